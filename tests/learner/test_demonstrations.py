"""Demonstrations in addition to episodes: which ones a step trains, with what gradient, and where a resumed run goes
on."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import LearnerConfig, SftConfig, TrainConfig
from asyncrl.data.rendered import RenderedDemonstrations
from asyncrl.errors import CheckpointError, ConfigError, DataError
from asyncrl.learner.batch.minibatch import ImitationBatch, Minibatch
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.demonstrations import DemonstrationFeed, DemonstrationOrder, sft_weight
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.flops import ForwardFlops
from tests.learner.support import (
    Run,
    assert_weights_equal,
    make_config,
    random_demonstrations,
    with_demonstrations,
    write_demonstrations,
)
from tests.learner.test_trainer import Setup

pytestmark = pytest.mark.slow


class OfNoModel:
    """The properties of a policy that a feed needs."""

    vocabulary, shares_prefixes = 280, False


def make_feed(count: int, policy: OfNoModel | None = None) -> DemonstrationFeed:
    flops = ForwardFlops(1.0, {None: 1.0})
    return DemonstrationFeed(random_demonstrations(count), 3, Ranks.alone(), policy or OfNoModel(), flops)


@given(count=st.integers(1, 20), seed=st.integers(0, 3), epochs=st.integers(1, 3))
def test_every_demonstration_comes_once_an_epoch(count: int, seed: int, epochs: int) -> None:
    order = DemonstrationOrder(count, seed)
    places = [order.at(place) for place in range(epochs * count)]
    assert set(Counter(places).values()) == {epochs}
    assert all(set(places[first : first + count]) == set(range(count)) for first in range(0, len(places), count))
    assert places == [DemonstrationOrder(count, seed).at(place) for place in range(epochs * count)]


def test_another_seed_and_another_epoch_have_another_order() -> None:
    one, two = DemonstrationOrder(50, 0), DemonstrationOrder(50, 1)
    first = [one.at(place) for place in range(50)]
    assert first != [one.at(place) for place in range(50, 100)]
    assert first != [two.at(place) for place in range(50)]


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ("constant", None, [0.4, 0.4, 0.4, 0.4]),
        ("linear", 4, [0.4, 0.3, 0.2, 0.0]),
        ("linear", None, [0.4, 0.36, 0.32, 0.2]),
        ("cosine", 4, [0.4, 0.2 * (1 + math.cos(math.pi / 4)), 0.2, 0.0]),
    ],
)
def test_the_weight_falls_as_the_schedule_says(schedule: str, steps: int | None, expected: list[float]) -> None:
    config = SftConfig(weight=0.4, schedule=schedule, steps=steps)
    assert [sft_weight(config, step, 10) for step in (0, 1, 2, 5)] == pytest.approx(expected)


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=24), updates=st.integers(1, 4), ranks=st.integers(1, 3)
)
def test_every_demonstration_is_in_one_pass_of_one_rank(lengths: list[int], updates: int, ranks: int) -> None:
    rows = random_demonstrations(len(lengths))
    parts = []
    for rank in range(ranks):
        alone = Ranks(rank, ranks, torch.device("cpu"))
        feed = DemonstrationFeed(rows, 0, alone, OfNoModel(), ForwardFlops(1.0, {None: 1.0}))
        parts.append(feed.build(range(len(lengths)), LearnerConfig(micro_tokens=40), updates))
    assert Counter(index for part in parts for passes in part.passes for one in passes for index in one) == Counter(
        range(len(lengths))
    )
    for update in range(updates):
        assert len({len(part.passes[update]) for part in parts}) == 1, "collectives of the ranks meet"
        members = [index for part in parts for one in part.passes[update] for index in one]
        assert {part.tokens[update] for part in parts} == {int(rows.trained[members].sum())}


def test_a_step_takes_a_share_of_the_batch_or_a_number_of_tokens() -> None:
    feed = make_feed(10)

    def taken(place: int, batch_size: int = 8, **sft: object) -> ImitationBatch | None:
        learner = LearnerConfig(batch_size=batch_size)
        return feed.batch_of_step(place, SftConfig(path=["x"], **sft), learner, 0, 1)  # type: ignore[arg-type]

    assert [found.count for share in (0.01, 0.25, 0.26, 2.0) if (found := taken(0, share=share))] == [1, 2, 3, 16]
    assert [found.count for share in (0.07, 0.071) if (found := taken(0, 100, share=share))] == [7, 8]
    for place in range(10):
        found = taken(place, tokens=20)
        assert found is not None
        members = feed.next(place, found.count)
        assert sum(found.tokens) == feed.rendered.trained[members].sum() >= 20
        assert feed.rendered.trained[members[:-1]].sum() < 20
    assert taken(0, weight=0.0) is None


def test_a_checkpoint_of_other_demonstrations_is_refused() -> None:
    feed, progress = make_feed(5), Progress()
    feed.resume(progress)
    progress.demonstrations = 3
    make_feed(5).resume(progress)
    with pytest.raises(CheckpointError, match="trained 3 demonstrations, whose files have "):
        make_feed(6).resume(progress)


def test_an_id_that_the_policy_lacks_is_refused() -> None:
    class Small(OfNoModel):
        vocabulary = 20

    with pytest.raises(ConfigError, match=r"the token id 2\d\d, and the policy has 20 ids"):
        make_feed(5, policy=Small())


def nll_gradient(model: Path, shown: RenderedDemonstrations) -> tuple[float, list[torch.Tensor]]:
    """The mean negative log-likelihood of the assistant's tokens, and its gradient, one conversation at a time."""
    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    total = torch.zeros(())
    for index in range(len(shown)):
        ids, mask = (torch.from_numpy(each.copy()) for each in shown.row(index))
        logits = bare(input_ids=ids[None].long()).logits[0, :-1]
        total = total - logits.log_softmax(-1).gather(1, ids[1:, None].long())[:, 0][mask[1:]].sum()
    loss = total / int(shown.mask.sum())
    loss.backward()
    return loss.item(), [each.grad for each in bare.parameters()]


@pytest.mark.parametrize("passes", [[[0, 1, 2, 3, 4]], [[3], [0, 4], [], [1, 2]]])
def test_the_gradient_is_that_of_the_episodes_and_the_weighed_one_of_the_demonstrations(
    passes: list[list[int]], model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The sampling temperature is that of the episodes alone."""
    setup = Setup(make_config(model, tmp_path), ranks)
    prepared, episodes = setup.prepared([setup.members]), [[3], [0, 1, 2], [4, 6, 7], [5]]
    loss, gradient = setup.gradient(prepared, episodes)
    shown = random_demonstrations(5)
    feed = DemonstrationFeed(shown, 0, ranks, setup.policy.module, ForwardFlops(1.0, {None: 1.0}))
    batch = feed.build(range(5), LearnerConfig(), weight=0.3)
    split = ImitationBatch(batch.batch, [passes], batch.tokens, batch.weight, batch.count)
    result = setup.trainer.learn(0, prepared, setup.episodes, [Minibatch(episodes, setup.totals)], imitation=split)
    nll, expected = nll_gradient(model, shown)
    assert result.summary["sft/loss"] == pytest.approx(nll, abs=1e-5)
    assert (result.summary["sft/tokens"], result.summary["sft/weight"]) == (shown.mask.sum(), 0.3)
    assert result.loss == pytest.approx(loss + 0.3 * nll, abs=1e-5)
    for ours, own, theirs in zip(setup.policy.gradient, gradient, expected, strict=True):
        torch.testing.assert_close(ours, own + 0.3 * theirs.to(ours.device), atol=1e-5, rtol=1e-4)
    setup.trainer.imitate(0, split)
    for ours, theirs in zip(setup.policy.gradient, expected, strict=True):
        torch.testing.assert_close(ours, 0.3 * theirs.to(ours.device), atol=1e-5, rtol=1e-4)
    assert setup.trainer.imitation_loss(split) == pytest.approx(nll * shown.mask.sum(), rel=1e-5)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The demonstrations of each step that is trained from here on."""
    original, found = DemonstrationFeed.build, list[list[int]]()

    def build(feed: DemonstrationFeed, members: list[int], *args: object) -> ImitationBatch:
        found.append(list(members))
        return original(feed, members, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DemonstrationFeed, "build", build)
    return found


@pytest.mark.parametrize(("event", "kept"), [("die_at", 2), ("stop_at", 3)])
def test_an_interrupted_run_goes_on_with_the_demonstrations_that_follow(
    event: str, kept: int, model: Path, ranks: Ranks, tmp_path: Path, trained: list[list[int]]
) -> None:
    def config(name: str) -> TrainConfig:
        values = {"steps": 6, "minibatches": 2, "micro_tokens": 48}
        made = with_demonstrations(
            make_config(model, tmp_path / name, **values), weight=0.5, schedule="linear", steps=5
        )
        if not (tmp_path / name).exists():
            write_demonstrations(made, made.algorithm.sft.path or [], 7)
        return made

    whole = Run(config("whole")).train(ranks)
    expected = trained.copy()
    assert [len(each) for each in expected] == [2] * 5, "step 5 has a weight of 0"
    assert len({index for each in expected[:3] for index in each}) == 6
    trained.clear()
    Run(config("stopped"), **{event: 3}).until_stopped(ranks)
    assert trained == expected[:3]
    del trained[kept:]
    resumed = Run(config("stopped")).train(ranks)
    assert trained == expected, "the steps that no checkpoint has train the same again"
    assert_weights_equal(resumed.final, whole.final)
    metrics = resumed.metrics
    assert metrics.of("sft/weight") == pytest.approx({step: 0.5 - step / 10 for step in range(kept, 5)})
    assert metrics.of("sft/loss") == {step: loss for step, loss in whole.metrics.of("sft/loss").items() if step >= kept}
    assert metrics.of("sft/epoch")[5] == pytest.approx(10 / 7)
    assert whole.metrics.of("trajectories_trained")[5] == 48, "those of the replay alone"


def test_a_run_without_rendered_demonstrations_says_what_to_do(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = with_demonstrations(make_config(model, tmp_path))
    (tmp_path / "shown.parquet").touch()
    with pytest.raises(DataError, match="`asyncrl train` and `asyncrl sft` render them"):
        Run(config).train(ranks)
