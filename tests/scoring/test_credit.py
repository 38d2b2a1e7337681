"""Step scores as token-level credit: from the scorer's labels through the learner's batch to each estimator, in which
outcome and process parts keep their own baselines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config.schema import ScoringConfig, ShapingConfig
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.types import BatchPlan
from tests.algorithms.support import alone, make_algorithm
from tests.scoring.fakes import TextPRM, episode, lease, make_scorer

CPU = torch.device("cpu")
TALES = [
    (("good", "bad", "72"), 1.0),
    (("bad", "bad", "71"), 0.0),
    (("good", "72"), 1.0),
    (("good", "good", "70"), 0.0),
]


def batch(outcomes=None, steps=None, **shaping):
    """A group of four episodes with tools, as the learner has them; outcomes and step scores may be put in."""
    config = ScoringConfig(shaping=ShapingConfig(**shaping))
    found = []
    for index, (texts, _) in enumerate(TALES):
        tools = [("tool", "ok")] * (len(texts) - 1)
        spoken = [("assistant", f"call {text}" if text in ("good", "bad") else text) for text in texts]
        turns = [("prompt", "?"), spoken[0]] + [turn for pair in zip(tools, spoken[1:], strict=True) for turn in pair]
        found.append(episode(*turns, index=index))
    scorer = make_scorer(config, TextPRM(lambda text: 0.25 if "bad" in text else 0.75))
    labels = [each.labels for each in scorer.score([lease(each, "rules", "prm") for each in found])]
    assert [each.outcome for each in labels] == [outcome for _, outcome in TALES]
    trajectories = [trajectory for _, trajectory in found]
    plan = BatchPlan(
        0,
        0,
        [each.id for each in trajectories],
        ["g"] * 4,
        [len(each) for each in trajectories],
        [each.sampled_tokens for each in trajectories],
        [1.0] * 4,
    )
    episodes, share = build_episodes(plan, labels, CPU), build_local_batch(range(4), trajectories, CPU)
    if outcomes is not None:
        episodes = replace(episodes, outcome=torch.tensor(outcomes), reward=torch.tensor(outcomes))
    if steps is not None:
        episodes = replace(episodes, step_scores=torch.full_like(episodes.step_scores, steps))
    return episodes, replace(share.tokens, proximal=share.tokens.behaviour, values=torch.zeros(len(share.ids)))


def advantages(advantage, episodes, tokens):
    algorithm = make_algorithm(advantage=advantage, loss="gpg", correction=[])
    result = algorithm.prepare(episodes, tokens, alone).advantages
    assert result[~tokens.mask].count_nonzero() == 0, "a tool's or prompt's token has no advantage"
    return result[tokens.mask].double()


def test_steps_reach_every_estimator_that_reads_them():
    plain, tokens = batch()
    flat, _ = batch(steps=0.5)
    gae = ("gae", {"step_weight": 1.0})
    for name in ("pure", "process_grpo", "prime", gae):
        assert not torch.allclose(advantages(name, plain, tokens), advantages(name, flat, tokens)), name


def test_gae_pays_a_step_at_its_last_token():
    episodes, tokens = batch()
    with_steps = advantages(("gae", {"step_weight": 2.0, "lam": 1.0}), episodes, tokens)
    without = advantages(("gae", {"lam": 1.0}), episodes, tokens)
    still_to_come = np.zeros(len(tokens.mask))
    for sequence, end, score in zip(episodes.step_sequence, episodes.step_end, episodes.step_scores, strict=True):
        mine = (tokens.sequence == sequence) & (tokens.position < end)
        still_to_come[mine.numpy()] += 2 * float(score)
    np.testing.assert_allclose((with_steps - without).numpy(), still_to_come[tokens.mask.numpy()], atol=1e-5)


@pytest.mark.parametrize("name", ["pure", "process_grpo"])
def test_outcome_and_process_have_baselines_of_their_own(name):
    """The advantage of both is the sum of the advantages of each, for every scale and offset of the other."""
    both = (name, {"outcome_weight": 0.5})
    episodes, tokens = batch()
    nothing = [0.3] * 4
    process, _ = batch(outcomes=nothing)
    outcome, _ = batch(steps=0.0)
    total = advantages(both, process, tokens) + advantages(both, outcome, tokens)
    torch.testing.assert_close(advantages(both, episodes, tokens), total)
    torch.testing.assert_close(advantages(both, process, tokens), advantages(name, process, tokens))


def test_prime_centres_outcome_and_process_apart():
    """Without the steps' differences only the outcome is left, and the other way round."""
    right, tokens = batch(steps=0.5)
    signs = advantages("prime", right, tokens).sign()
    owners = tokens.sequence[tokens.mask]
    outcomes = torch.tensor([outcome for _, outcome in TALES])
    assert (signs == torch.where(outcomes[owners] > 0, 1.0, -1.0)).float().mean() > 0.7
    shifted, _ = batch(outcomes=[10.0 + outcome for _, outcome in TALES])
    plain, _ = batch()
    torch.testing.assert_close(advantages("prime", shifted, tokens), advantages("prime", plain, tokens))


def test_the_transforms_are_what_algorithms_read_and_the_reward_does_not():
    plain, _ = batch(process_weight=1.0)
    deltas, _ = batch(process_weight=1.0, step_transforms=["delta"])
    assert deltas.step_scores[:3].tolist() == pytest.approx([0.5, -0.5, 0.75])
    assert deltas.reward.tolist() == plain.reward.tolist()
    clipped, tokens = batch(step_transforms=["clip"], clip_eta=0.75)
    assert clipped.step_scores[:3].tolist() == [0, -0.5, 0]
    assert advantages("pure", clipped, tokens).isfinite().all()
