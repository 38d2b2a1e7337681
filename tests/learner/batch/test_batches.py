"""A finished run is trained again from its store, and ends in the same weights."""

from __future__ import annotations

import copy
import math
import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.errors import ConfigError, RefusedError, StoppedError, StoreError
from asyncrl.learner.batch.batches import RecordedReplay
from asyncrl.learner.batch.from_config import open_batches
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.replay.batches.sampling import Prioritised
from asyncrl.replay.starts.admission import Admission
from asyncrl.types import BatchPlan
from tests.fake_replay import FakeReplay
from tests.helpers import make_labels
from tests.learner.support import Run, assert_weights_equal, make_config, of_ticket, random_trajectory
from tests.replay.support import Core, make_settings

pytestmark = pytest.mark.slow


class LiveReplay(FakeReplay):
    """A replay with a fleet that makes an episode of every ticket at once. The learner is stopped when it asks for the
    plan of step `stop_at`."""

    def __init__(self, core: Core, stop_at: int | None = None) -> None:
        super().__init__(core)
        self._rng = np.random.default_rng(0)
        self._stop_at = stop_at

    def plan(self, step: int) -> BatchPlan | None:
        if step == self._stop_at:
            raise StoppedError("stop")
        for ticket in self.core.tickets(100):
            self.core.put(of_ticket(random_trajectory(max(0, step), self._rng), ticket))
        for trajectory in self.core.lease():
            self.score(trajectory.id, float(self._rng.random()))
        return super().plan(step)

    def score(self, name: str, reward: float) -> None:
        self.core.label(name, reward)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        return None if step == self._stop_at else super().plan_ahead(step)


class UnevenReplay(LiveReplay):
    """The same, with labels that have a score `style`; those of the first attempt at the first of a group lack it."""

    def score(self, name: str, reward: float) -> None:
        extra = {} if name.endswith(".0.0") else {"style": reward}
        try:
            self.core.put_labels(replace(make_labels(name, reward), extra=extra))
        except RefusedError as error:
            self.core.scoring_failed(name, reason=str(error))


def make_core(folder: Path, **settings: Any) -> Core:
    return Core(folder, make_settings(admission=Admission(2, 8), batch_size=8, group_size=4, **settings))


def run_once(config: TrainConfig, folder: Path, ranks: Ranks, keep: float) -> Run:
    """A run that leaves its store in `folder`."""
    core = make_core(folder, keep_steps=keep, sampler=Prioritised(1.0, 0.5))
    run = Run(config, LiveReplay(core)).train(ranks)
    core.store.close()
    return run


def test_training_again_from_the_store_ends_in_the_same_weights_bit_for_bit(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    first = run_once(make_config(model, tmp_path / "first"), tmp_path / "store", ranks, math.inf)
    config = make_config(model, tmp_path / "again")
    with closing(RecordedReplay(tmp_path / "store", config.learner.steps)) as replay:
        again = Run(config, replay).train(ranks)
    assert_weights_equal(first.final, again.final)
    with pytest.raises(StoreError, match="has 4 plans"):
        RecordedReplay(tmp_path / "store", 5)


def test_a_run_is_not_trained_again_by_an_algorithm_that_reads_a_score_which_its_labels_lack(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run_once(make_config(model, tmp_path / "first"), tmp_path / "store", ranks, math.inf)
    config = make_config(model, tmp_path / "again")
    config.algorithm.stream = [PartConfig("ce", {"score": "style"})]
    with (
        closing(RecordedReplay(tmp_path / "store", config.learner.steps)) as replay,
        pytest.raises(StoreError, match=r"cannot be trained again by this algorithm: plan 0 .*\['style'\]"),
    ):
        Run(config, replay).train(ranks)


def test_a_resumed_run_whose_algorithm_reads_a_score_that_stored_labels_lack_goes_on_without_these(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config, core = make_config(model, tmp_path, steps=6), make_core(tmp_path / "store", keep_steps=math.inf)
    Run(config, LiveReplay(core, stop_at=3)).until_stopped(ranks)
    recorded, ready = core.status()["depth_plans"], core.status()["depth_ready"]
    assert ready
    config.algorithm.stream = [PartConfig("ce", {"score": "style"})]
    resumed = Run(config, UnevenReplay(core)).train(ranks)
    assert sorted(resumed.metrics.of("loss/ce")) == list(range(recorded, 6))
    dead = core.dead_letters()
    of_before = [name for name in dead if not name.endswith(".0.0")]
    assert len(of_before) >= 3 * ready
    assert len(dead) > len(of_before)
    assert all("reads the scores ['style']" in each.reason for each in dead.values())
    later = [name for step in range(recorded, 6) for name in core.planned(step).ids]
    assert all("style" in labels.extra for labels in core.labels(later))
    assert (core.audit()["lost"], core.audit()["trained_twice"]) == (0, 0)
    core.store.close()


@pytest.mark.parametrize("step", [3, 4], ids=["between two checkpoints", "at a checkpoint"])
def test_training_again_is_exact_over_a_change_and_over_a_kill_before_its_first_step(
    model: Path, ranks: Ranks, tmp_path: Path, step: int
) -> None:
    config, core = make_config(model, tmp_path / "first", steps=6), make_core(tmp_path / "store", keep_steps=math.inf)
    config.algorithm.kl = PartConfig("k3", {"weight": 0.1, "target": 0.01})
    before = Run(config, LiveReplay(core, stop_at=step)).until_stopped(ranks)
    changed = copy.deepcopy(config)
    changed.learner.lr, changed.learner.minibatches, changed.learner.weight_decay = 1e-2, 2, 0.1
    changed.algorithm.loss = PartConfig("ppo", {"clip_low": 0.05, "clip_high": 0.05})
    changed.algorithm.kl = PartConfig("k3", {"weight": 0.5, "target": 0.01})
    Run(changed, LiveReplay(core, stop_at=step)).until_stopped(ranks)
    core.restart()
    after = Run(changed, LiveReplay(core)).train(ranks)
    core.store.close()
    assert_weights_equal(before.weights[step], after.weights[step])
    for number, given in enumerate((config, changed)):
        given = copy.deepcopy(given)
        given.run.dir = str(tmp_path / f"again-{number}")
        with closing(RecordedReplay(tmp_path / "store", 6)) as replay:
            assert {each.step for each in replay.configure({}, 0)} == {step}
            again = Run(given, replay).train(ranks)
        for version in range(step, 7):
            assert_weights_equal(after.weights[version], again.weights[version])


def test_a_run_goes_on_from_each_checkpoint_that_is_kept_once_the_newer_ones_are_damaged(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The replay keeps what the oldest of three checkpoints does not cover, although its retention asks for nothing."""
    config = make_config(model, tmp_path, steps=8, keep_checkpoints=3)
    core = make_core(tmp_path / "store")
    whole = Run(config, LiveReplay(core)).train(ranks)
    with pytest.raises(RefusedError, match="trained"):
        LiveReplay(core).fetch(core.plan(1).ids)  # type: ignore[union-attr]
    checkpoints = tmp_path / "run" / "checkpoints"
    for resumed_from, newer in ((6, [8]), (4, [6, 8])):
        for step in newer:
            (checkpoints / f"step-{step:06d}" / "progress.json").write_text("damaged")
        resumed = Run(config, LiveReplay(core)).train(ranks)
        assert min(resumed.metrics.of("loss")) == resumed_from
        assert_weights_equal(resumed.final, whole.final)
    core.store.close()


def test_a_run_whose_only_checkpoint_is_lost_is_trained_from_its_first_weights(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config, core = make_config(model, tmp_path, steps=2), make_core(tmp_path / "store")
    whole = Run(config, LiveReplay(core)).train(ranks)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = Run(config, LiveReplay(core)).train(ranks)
    assert_weights_equal(again.final, whole.final)
    core.store.close()


def test_a_store_that_kept_nothing_is_refused_with_the_key_that_keeps(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run_once(make_config(model, tmp_path / "first"), tmp_path / "store", ranks, 0)
    config = make_config(model, tmp_path / "again")
    with (
        closing(RecordedReplay(tmp_path / "store", 4)) as replay,
        pytest.raises(StoreError, match="retention=all"),
    ):
        Run(config, replay).train(ranks)


def test_a_folder_without_a_store_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="replay folder of a run"):
        RecordedReplay(tmp_path, 1)


def test_training_a_run_from_its_own_store_is_refused(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    store = tmp_path / "run" / "replay"
    store.mkdir(parents=True)
    config.replay.source = str(store)
    with pytest.raises(ConfigError, match=r"another run\.name"):
        open_batches(config, 0, zmq.Context.instance(), threading.Event())
