"""No call of a group waits for longer than it was told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import Bucket, GatheredBucket
from asyncrl.weights.group import WeightGroup
from asyncrl.weights.manifest import TensorSpec
from asyncrl.weights.server import WeightServer
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


def group_over(backend: Backend, timeout_s: float) -> WeightGroup:
    store, device = dist.HashStore(), torch.device("cpu")
    return WeightGroup(store, "g", 0, 2, device, "127.0.0.1", timeout_s, lambda *_: backend)


def test_a_group_that_never_comes_together_is_given_up_and_left(hangs: threading.Event) -> None:
    group = group_over(Backend(hangs), 0.05)
    with pytest.raises(UnavailableError, match=r"could not begin in 0\.05 s"):
        group.begin(torch.zeros(8))
    group.close()
    assert group.hung is not None
    assert not group.hung.done()


class OneEngine:
    """A weight server to which one engine always asks to join."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, backend: str, describe: Any, patience_s: float) -> list[bytes]:
        describe([b"engine"])
        self.calls += 1
        return [b"engine"]


def test_while_a_broadcast_hangs_pushes_go_on_without_any(hangs: threading.Event) -> None:
    server = OneEngine()
    make_group = partial(WeightGroup, backend=lambda *_: Backend(hangs))
    broadcaster = Broadcaster(cast(WeightServer, server), "127.0.0.1", torch.device("cpu"), 0.05, make_group)
    bucket = Bucket((TensorSpec("a", "float32", (4,)),))
    gathered = GatheredBucket(bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8))
    # One that the test before left to hang may be about to end.
    before = set(threading.enumerate())
    for version in range(4):
        assert list(broadcaster.through(version, [bucket], [gathered])) == [gathered]
    assert (server.calls, broadcaster.failures) == (1, 1)
    assert len(set(threading.enumerate()) - before) == 1
    hangs.set()
    until(lambda: not set(threading.enumerate()) - before)
    list(broadcaster.through(4, [bucket], [gathered]))
    assert server.calls == 2
    broadcaster.close()


def test_a_backend_that_fails_to_begin_or_to_end_harms_nobody_else() -> None:
    group = group_over(Backend(), 30)
    with pytest.raises(UnavailableError, match="invalid usage"):
        group.begin(torch.zeros(8))
    group.close()
