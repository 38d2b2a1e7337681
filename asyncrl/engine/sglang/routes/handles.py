"""Handles of GPU memory, pickled so that a server's unpickler accepts them.

The body of a request for buckets has the form of SGLang's `flattened_bucket`: one pickle for each rank, with a buffer
uint8[n] and the layout of its tensors. The server's unpickler accepts known names only, and this process has no SGLang
to write such a pickle.

So the buffer is pickled as a call of torch's rebuild function. SGLang's servers replace this function by one that finds
a GPU by its uuid, since indices differ between processes. The layout is pickled as plain namespaces, because the server
reads only attributes. SGLang 0.5.17 and 0.5.23 accept these pickles.

Torch counts the processes that use a buffer. It keeps the buffer's memory until each process has opened its handle and
dropped the buffer. After a failure the actor lowers the count for the server by `release`, because a handle that was
never opened would keep the memory.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from asyncrl.weights.buckets import Bucket
from asyncrl.weights.manifest import DTYPES

DEVICE = 6
"""The position of the device in the arguments of torch's rebuild function."""

COUNTER = slice(11, 13)
"""The position of the counter of processes that use the buffer: a file and an offset."""

Rebuild = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function with its arguments, which gives a buffer in another process."""


class Handle:
    """A handle of `flat`, a buffer on a GPU, for one other process. It is pickled as the call that rebuilds the buffer
    there."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._rebuild: Rebuild = reductions.reduce_tensor(flat)

    def __reduce__(self) -> Rebuild:
        rebuild, arguments = self._rebuild
        device = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return rebuild, (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])

    def release(self) -> None:
        """Lower the count of processes that use the buffer, as if the other process had dropped it."""
        torch.UntypedStorage._release_ipc_counter(*self._rebuild[1][COUNTER])


@contextmanager
def shared(flat: torch.Tensor, processes: int) -> Iterator[list[Handle]]:
    """Make a handle of a buffer on a GPU for each of `processes` other processes.

    After an error in the `with` block the memory is released at once.
    """
    handles: list[Handle] = []
    try:
        handles.extend(Handle(flat) for _ in range(processes))
        del flat
        yield handles
    except BaseException:
        # A process may still be reading. This is harmless: weights are used only after a whole update has succeeded.
        for handle in handles:
            handle.release()
        raise


def handles_of(bucket: Bucket, buffers: Sequence[Handle]) -> list[str]:
    """The pickle for each rank: the rank's handle and the bucket's layout. All `buffers` are handles of the same
    memory."""
    layout = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=DTYPES[entry.dtype],
            start_idx=start,
            end_idx=start + entry.nbytes,
            numel=entry.nbytes,
        )
        for entry, start in bucket.placed()
    ]
    return [pickled({"flattened_tensor": each, "metadata": layout}) for each in buffers]


def pickled(body: Any) -> str:
    """Pickle `body` as text."""
    return base64.b64encode(pickle.dumps(body)).decode()
