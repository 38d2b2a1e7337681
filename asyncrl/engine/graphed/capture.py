"""Records a function as a CUDA graph, which repeats all its kernels with one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"})
"""The operations of torch whose results the host needs before it can go on."""


class NoGraphError(Exception):
    """The passes of this model cannot be recorded as graphs. The message says why."""


class RefuseWaiting(TorchDispatchMode):
    """Refuses operations for which the host must wait for the device. A graph cannot repeat them.

    Raises NoGraphError: the code computes such an operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING or (name == "index" and _has_mask(args[1])):
            raise NoGraphError(f"the host has to wait for the result of {name} in each pass")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def capture(function: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Record the kernels of `function`, and return a function that repeats them on the current stream.

    Call `function` once before, since first calls compile kernels. Graphs that are recorded in the same `stream` with
    the same `pool` (see `torch.cuda.graph_pool_handle`) share the memory of their intermediate results, so they must
    run one after another. Drop them together: to drop one graph also frees the cuBLAS workspace of their stream.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay
