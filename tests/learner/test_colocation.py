"""Learner and servers share GPUs: the weights are the same as without sharing, and the learner leaves nothing on a
device that it has released."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.gpu_lock import ServersLock
from asyncrl.machine.host_memory import OnHost
from asyncrl.types import BatchPlan
from tests.helpers import until
from tests.learner.support import PlannedReplay, Run, assert_weights_equal, make_config, with_critic

pytestmark = pytest.mark.slow


@contextmanager
def actor_of(config: TrainConfig) -> Iterator[list[int]]:
    """Play an actor whose servers use the GPUs as often as they may. Yields the versions that they waited for."""
    over, versions = threading.Event(), list[int]()
    lock = ServersLock(locations.gpu_locks(config.run), 1)

    def act() -> None:
        while not over.is_set():
            if lock.take():
                versions.append(lock.version())
                until(lambda: lock.is_wanted() or over.is_set())
                lock.give_back()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield versions
    finally:
        over.set()
        thread.join()


class Waiting(PlannedReplay):
    """A batch is complete once servers had the version that it is sampled by."""

    def __init__(self, config: TrainConfig, versions: list[int]) -> None:
        super().__init__(config)
        self._versions = versions

    def plan(self, step: int) -> BatchPlan | None:
        until(lambda: step in self._versions)
        return super().plan(step)


def test_contents_come_back_bit_for_bit_however_they_are_cut() -> None:
    whole = torch.randn(1000)
    tensors = [whole, whole[10:20], torch.arange(7), torch.randn(3, 5).T, torch.zeros(0), torch.tensor(4.0)]
    before = [each.clone() for each in tensors]
    for chunk in (64, 4096, 1 << 20):
        host = OnHost(torch.device("cpu"), chunk)
        for _ in range(2):
            assert host.take(tensors) == 4000 + 56 + 60 + 4
            assert {each.untyped_storage().nbytes() for each in tensors} == {0}
            host.put_back()
            assert all(map(torch.equal, tensors, before))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_free_while_its_contents_are_on_the_host() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.randn(1 << 26, device=device), torch.randn(1000, device=device)]
    before, allocated = [each.clone().cpu() for each in tensors], torch.cuda.memory_allocated(device)
    host = OnHost(device)
    assert host.take([*tensors, torch.zeros(3)]) == 4 * (1 << 26) + 4000
    assert allocated - torch.cuda.memory_allocated(device) >= 4 << 26
    host.put_back()
    assert all(torch.equal(each.cpu(), kept) for each, kept in zip(tensors, before, strict=True))


@pytest.mark.heavy
def test_a_run_in_turns_ends_with_the_same_bits_and_hands_over_each_version(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    alone = Run(with_critic(make_config(model, tmp_path / "alone"))).train(ranks)
    config = with_critic(make_config(model, tmp_path / "turns"))
    config.cluster.colocated = True
    with actor_of(config) as versions:
        run = Run(config, Waiting(config, versions)).train(ranks)
    assert_weights_equal(run.final, alone.final)
    assert list(dict.fromkeys(versions))[:4] == [0, 1, 2, 3]
    assert versions == sorted(versions)
    row = run.metrics.rows[-1][1]
    assert {"seconds/release", "seconds/onload", "seconds/offload"} <= row.keys()
    assert "seconds/release" not in alone.metrics.rows[-1][1]


@pytest.mark.heavy
def test_a_learner_that_is_stopped_or_dies_between_two_turns_resumes_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    whole = Run(make_config(model, tmp_path / "whole", steps=5)).train(ranks)
    for event, kept in (("stop_at", 3), ("die_at", 2)):
        config = make_config(model, tmp_path / event, steps=5)
        config.cluster.colocated = True
        with actor_of(config):
            Run(config, **{event: 3}).until_stopped(ranks)
            resumed = Run(config).train(ranks)
        assert resumed.replay.called("plan") == list(range(kept, 5))
        assert_weights_equal(resumed.final, whole.final)


def test_evaluations_are_complete_before_the_learner_takes_the_gpus(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, eval_every=1)
    config.cluster.colocated = True
    with actor_of(config):
        run = Run(config).train(ranks)
    calls = [each for each in run.replay.calls if each[0] in ("evaluate", "plan")]
    assert calls == [each for step in range(4) for each in (("evaluate", step), ("plan", step))] + [("evaluate", 4)]
    assert run.evaluations.of("eval/version") == {step: step for step in range(5)}
