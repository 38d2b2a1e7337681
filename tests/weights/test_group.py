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


class Once:
    """A backend whose broadcasts begin, but that of number `fails` ends badly. `waited` counts the waits for them."""

    def __init__(self, fails: int | None = None) -> None:
        self._fails = fails
        self.begun = self.waited = 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.begun += 1
        return Work(self, fails=self.begun - 1 == self._fails)

    def abort(self) -> None:
        pass


class Work:
    """A broadcast under way."""

    def __init__(self, backend: Once, fails: bool) -> None:
        self._backend, self._fails = backend, fails

    def wait(self, timeout: Any) -> None:
        self._backend.waited += 1
        if self._fails:
            raise RuntimeError("a rank died")


def some_buckets(count: int) -> tuple[list[Bucket], list[GatheredBucket]]:
    plan = [Bucket((TensorSpec(f"t{index}", "float32", (4,)),)) for index in range(count)]
    return plan, [GatheredBucket(each, torch.zeros(each.nbytes, dtype=torch.uint8)) for each in plan]


def test_after_a_broadcast_failed_the_same_engines_are_called_to_a_group_of_another_name() -> None:
    """Ranks of a group that died would otherwise find what it left in the store."""
    names: list[str] = []
    # The buckets of the first push arrive, and its checksums do not.
    backends = [Once(fails=2), Once()]

    def make_group(store: dist.Store, name: str, *rest: Any) -> WeightGroup:
        names.append(name)
        return partial(WeightGroup, backend=lambda *_: backends[len(names) - 1])(store, name, *rest)

    server = cast(WeightServer, OneEngine())
    broadcaster = Broadcaster(server, "127.0.0.1", torch.device("cpu"), 30, make_group)
    plan, gathered = some_buckets(2)
    list(broadcaster.through(0, plan, gathered))
    assert (broadcaster.broadcasts, broadcaster.failures) == (0, 1)
    list(broadcaster.through(1, plan, gathered))
    assert (broadcaster.broadcasts, broadcaster.failures) == (1, 1)
    assert len(set(names)) == 2
    broadcaster.close()


def test_what_a_failed_broadcast_left_under_way_is_not_waited_for_in_the_next() -> None:
    """The works of a dead group would fail in the next push, too."""
    # The first push has two works under way when one of them fails.
    backends = [Once(fails=0), Once()]
    made: list[str] = []

    def make_group(store: dist.Store, name: str, *rest: Any) -> WeightGroup:
        made.append(name)
        return partial(WeightGroup, backend=lambda *_: backends[len(made) - 1])(store, name, *rest)

    server = cast(WeightServer, OneEngine())
    broadcaster = Broadcaster(server, "127.0.0.1", torch.device("cpu"), 30, make_group)
    plan, gathered = some_buckets(3)
    list(broadcaster.through(0, plan, gathered))
    assert (broadcaster.broadcasts, broadcaster.failures, backends[0].begun) == (0, 1, 2)
    waited_for = backends[0].waited
    list(broadcaster.through(1, plan, gathered))
    assert (broadcaster.broadcasts, broadcaster.failures) == (1, 1)
    assert backends[0].waited == waited_for
    broadcaster.close()
