"""The implicit process model beside the policy: it learns outcomes, feeds `prime`, and resumes with the same bits."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import Choice, TrainConfig
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.run import train
from asyncrl.types import BatchPlan, Labels
from tests.learner.support import FakeMetrics, FakePublisher, FakeReplay, make_config
from tests.learner.test_loop import assert_weights_close, assert_weights_equal


class Telling(FakeReplay):
    """Outcomes that the tokens tell: every batch has the tokens of the first, and their outcomes."""

    last: int | None = None

    def plan(self, step: int) -> BatchPlan | None:
        if step == self.last:
            raise StoppedError("killed")
        plan = super().plan(step)
        assert plan is not None
        first = plan if step == 0 else super().plan(0)
        assert first is not None
        for index, (name, like) in enumerate(zip(plan.ids, first.ids, strict=True)):
            outcome = float(index % 2)
            self._labels[name] = Labels(name, outcome, outcome, "test")
            self._trajectories[name] = replace(self._trajectories[like], id=name, group_id=plan.group_ids[index])
        return replace(plan, tokens=first.tokens, sampled=first.sampled)


def prime(model: Path, folder: Path, **learner: object) -> TrainConfig:
    config = make_config(model, folder, lr=1e-5, batch_size=16, **learner)
    config.algorithm.advantage = Choice("prime", {"beta": 0.1})
    config.implicit.train, config.implicit.lr = True, 3e-3
    return config


def test_it_learns_to_tell_the_outcome_while_the_policy_trains_on_its_rewards(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config, metrics = prime(model, tmp_path, steps=16, checkpoint_every=16), FakeMetrics()
    train(config, ranks, Telling(config), FakePublisher(), metrics, threading.Event())
    losses = list(metrics.of("implicit/loss").values())
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert losses[-1] < 0.3
    assert metrics.of("implicit/accuracy")[15] == 1.0
    assert all(norm > 0 for norm in metrics.of("implicit/grad_norm").values())


def test_any_split_into_passes_trains_it_the_same(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    ends = []
    for name, micro_tokens in (("whole", 10_000), ("split", 40)):
        config, publisher = prime(model, tmp_path / name, micro_tokens=micro_tokens), FakePublisher()
        train(config, ranks, Telling(config), publisher, FakeMetrics(), threading.Event())
        ends.append(publisher.weights[4])
    assert_weights_close(ends[0], ends[1], atol=1e-5)


def test_it_resumes_from_its_own_checkpoint_with_the_same_bits(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config, whole = prime(model, tmp_path / "whole"), FakePublisher()
    train(config, ranks, Telling(config), whole, FakeMetrics(), threading.Event())
    config = prime(model, tmp_path / "broken")
    killed, resumed = Telling(config), FakePublisher()
    killed.last = 3
    with pytest.raises(StoppedError):
        train(config, ranks, killed, FakePublisher(), FakeMetrics(), threading.Event())
    train(config, ranks, Telling(config), resumed, FakeMetrics(), threading.Event())
    assert_weights_equal(whole.weights[4], resumed.weights[4])


def test_an_advantage_that_does_not_read_it_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = prime(model, tmp_path)
    config.algorithm.advantage = Choice("grpo")
    with pytest.raises(ConfigError, match="advantage=prime only"):
        train(config, ranks, Telling(config), FakePublisher(), FakeMetrics(), threading.Event())
