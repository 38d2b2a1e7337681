"""No call of a group waits for longer than it was told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError
from asyncrl.weights import group as weight_group
from asyncrl.weights.group import Group


class Backend:
    """Hangs or fails as NCCL does where another rank cannot join."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        self._hangs = hangs

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        if self._hangs is not None:
            self._hangs.wait()
        raise RuntimeError("invalid usage")

    def abort(self) -> None:
        assert self._hangs is None, "an abort waits for the call that hangs"
        raise RuntimeError("abort timed out")


@pytest.fixture
def hangs() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def group_over(backend: Backend, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Group:
    monkeypatch.setattr(weight_group, "_backend", lambda *_: backend)
    return Group(dist.HashStore(), "g", 0, 2, torch.device("cpu"), "127.0.0.1", timeout_s)


def test_a_group_that_never_comes_together_is_given_up_and_left(
    monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
) -> None:
    group = group_over(Backend(hangs), monkeypatch, 0.05)
    with pytest.raises(UnavailableError, match=r"could not begin in 0\.05 s"):
        group.begin(torch.zeros(8))
    group.close()


def test_a_backend_that_fails_to_begin_or_to_end_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_over(Backend(), monkeypatch, 30)
    with pytest.raises(UnavailableError, match="invalid usage"):
        group.begin(torch.zeros(8))
    group.close()
