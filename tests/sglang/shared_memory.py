"""A kept buffer in memory that processes without a GPU share, so that a server on the CPU can keep it open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from asyncrl.engine.sglang.inside import FOLDER, LOADER
from asyncrl.engine.sglang.routes import kept, opening
from asyncrl.engine.sglang.routes.base import ServerEnd
from asyncrl.engine.sglang.routes.ipc import IpcServerRoute
from asyncrl.weights.routes import ServerFacts

CPU = torch.device("cpu")
ARGUMENTS = ["--custom-weight-loader", LOADER]
ENVIRONMENT = {"PYTHONPATH": str(FOLDER)}


class Call:
    """Is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced

    def release(self) -> None:
        """Do nothing: no counter keeps this memory."""


def shared_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def handle(flat: torch.Tensor) -> Call:
    manager, name, size = flat.untyped_storage()._share_filename_cpu_()
    storage = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, manager, name, size)
    typed = Call(reductions.rebuild_typed_storage, storage, torch.uint8)
    return Call(reductions.rebuild_tensor, torch.Tensor, typed, (0, flat.size(), flat.stride(), False))


def keep_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the route `ipc` keep its buffer in shared memory."""

    def opened(end: ServerEnd, facts: ServerFacts, settings: opening.ServerRouteSettings) -> IpcServerRoute:
        return IpcServerRoute(end, CPU, settings.bucket_bytes)

    monkeypatch.setattr(kept, "new_bytes", shared_bytes)
    monkeypatch.setattr(kept, "Handle", handle)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setitem(opening.OPENERS, "ipc", opened)  # type: ignore[arg-type]


def shares_memory(*_: Any) -> ServerFacts:
    """Facts of a server with which this process can share memory."""
    return ServerFacts(here=True, gpus=(0,), same_gpus=True, visible=1)
