"""No call of a group waits for longer than it was told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from asyncrl.errors import UnavailableError
from asyncrl.weights import group as weight_group
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import Bucket, Entry, GatheredBucket
from asyncrl.weights.group import WeightGroup
from asyncrl.weights.server import WeightServer
from asyncrl.weights.transfers import Broadcasts
from tests.helpers import until

pytestmark = pytest.mark.slow


class Backend:
    """Hangs or fails as NCCL does where another rank cannot join."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        self._hangs = hangs

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        if self._hangs is not None:
            self._hangs.wait()
        raise RuntimeError("invalid usage")

    def abort(self) -> None:
        assert self._hangs is None or self._hangs.is_set(), "an abort waits for the call that hangs"
        raise RuntimeError("abort timed out")


@pytest.fixture
def hangs() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def group_over(backend: Backend, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> WeightGroup:
    monkeypatch.setattr(weight_group, "_backend", lambda *_: backend)
    return WeightGroup(dist.HashStore(), "g", 0, 2, torch.device("cpu"), "127.0.0.1", timeout_s)


def test_a_group_that_never_comes_together_is_given_up_and_left(
    monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
) -> None:
    group = group_over(Backend(hangs), monkeypatch, 0.05)
    with pytest.raises(UnavailableError, match=r"could not begin in 0\.05 s"):
        group.begin(torch.zeros(8))
    group.close()
    assert group.hung is not None
    assert not group.hung.done()


def test_while_a_broadcast_hangs_pushes_go_on_without_any(
    monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
) -> None:
    monkeypatch.setattr(weight_group, "_backend", lambda *_: Backend(hangs))
    publisher = WeightServer("127.0.0.1", 0, zmq.Context(), broadcasts=Broadcasts("gloo", ""))
    summoned: list[int] = []

    def summon(backend: str, describe: Any, patience_s: float) -> list[bytes]:
        describe([b"engine"])
        summoned.append(1)
        return [b"engine"]

    monkeypatch.setattr(publisher, "call", summon)
    broadcaster = Broadcaster(publisher, "127.0.0.1", torch.device("cpu"), 0.05)
    bucket = Bucket((Entry("a", "float32", (4,)),))
    threads = threading.active_count()
    for version in range(4):
        broadcaster.begin(version, [bucket])
        broadcaster.start(GatheredBucket(bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8)))
        broadcaster.commit()
    assert (len(summoned), broadcaster.failures) == (1, 1)
    assert threading.active_count() == threads + 1
    hangs.set()
    until(lambda: threading.active_count() == threads)
    broadcaster.begin(4, [bucket])
    assert len(summoned) == 2
    broadcaster.close()
    publisher.close()


def test_a_backend_that_fails_to_begin_or_to_end_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_over(Backend(), monkeypatch, 30)
    with pytest.raises(UnavailableError, match="invalid usage"):
        group.begin(torch.zeros(8))
    group.close()
