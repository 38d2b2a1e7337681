"""Versions are prepared one after the other, and only the newest of those that wait."""

from __future__ import annotations

import threading
import weakref

import torch

from asyncrl.weights.delta import Delta
from asyncrl.weights.manifest import WeightSnapshot
from asyncrl.weights.preparation import Preparation
from tests.helpers import GENEROUS_S, until
from tests.weights.fakes import some_tensors


def test_a_version_that_a_newer_one_overtakes_before_its_turn_is_left_out() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    offered: list[int] = []

    def offer(snapshot: WeightSnapshot, delta: Delta | None) -> None:
        offered.append(snapshot.manifest.version)
        begun.set()
        assert goes_on.wait(GENEROUS_S)

    preparation = Preparation(offer, 64, deltas=False, threads=1)
    preparation.begin(0, some_tensors())
    assert begun.wait(GENEROUS_S)
    for version in (1, 2):
        preparation.begin(version, some_tensors())
    goes_on.set()
    until(lambda: 2 in offered)
    preparation.close()
    assert offered == [0, 2]


def test_versions_that_newer_ones_overtake_leave_memory_at_once() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def offer(snapshot: WeightSnapshot, delta: Delta | None) -> None:
        begun.set()
        assert goes_on.wait(GENEROUS_S)

    preparation = Preparation(offer, 64, deltas=False, threads=1)
    kept = []
    for version in range(12):
        tensor = torch.zeros(3)
        preparation.begin(version, {"w": tensor})
        kept.append(weakref.ref(tensor))
        assert begun.wait(GENEROUS_S)
    del tensor
    assert sum(each() is not None for each in kept) == 2
    goes_on.set()
    preparation.close()
