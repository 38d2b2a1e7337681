"""A buffer of the actor that a server keeps open: each push after the first one is one short request.

The buffer holds a whole version. The actor fills it before it pauses the server. At the first push the server opens the
buffer's handle and records its copies from the buffer into the model. Later pushes only make the same copies again
(inside/asyncrl_loader.py).

Torch counts the processes that use a buffer, and keeps the buffer's memory while the count is not 0. A server that dies
does not lower the count, so `drop` lowers it. After that, this process may use the memory for other things, even if a
server is still reading it. This is harmless: weights are used only after a whole update has succeeded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncrl.engine.sglang.inside import LOADER
from asyncrl.engine.sglang.routes.base import fill_from_host
from asyncrl.engine.sglang.routes.handles import Handle, pickled
from asyncrl.weights.buckets import Bucket, fill
from asyncrl.weights.manifest import TensorSpec, new_bytes
from asyncrl.weights.threads import in_own_thread


def reason_to_keep_none(info: Mapping[str, Any]) -> str:
    """The reason why a server with this `/server_info` keeps no buffer open; "" if it does."""
    if LOADER not in (info.get("custom_weight_loader") or ()):
        return f"the server was started without --custom-weight-loader {LOADER}"
    if any(int(info.get(name) or 1) > 1 for name in ("tp_size", "pp_size", "dp_size")):
        # SGLang copies the buffer to the GPU of each process, and the copies would not change with the buffer.
        return "the server has several GPUs"
    if info.get("enable_memory_saver"):
        return "the server gives its GPU to the learner in turns, and an open buffer would take memory there"
    return ""


def whole_bucket(specs: Sequence[TensorSpec]) -> Bucket:
    """One bucket with all tensors, each at an address from which a GPU copies fast."""
    # Without checksums, which differ between versions, the buckets of all versions are equal, so the buffer stays.
    return Bucket(tuple(TensorSpec(spec.name, spec.dtype, spec.shape) for spec in specs))


class KeptBuffer:
    """A buffer on `device` for whole versions, which one server keeps open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bucket: Bucket | None = None
        self._flat: torch.Tensor | None = None
        self._handle: Handle | None = None
        self._key = ""
        self._is_open = False

    def is_for(self, bucket: Bucket) -> bool:
        """True if the buffer exists, and was made for this bucket."""
        return self._bucket == bucket

    async def fill(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill the buffer with the bucket's tensors, which are on the buffer's device or on the CPU. Another bucket
        than before gets a new buffer. Raises torch.OutOfMemoryError if there is no room for it."""
        if self._flat is None or not self.is_for(bucket):
            self.drop()
            self._flat, self._bucket, self._key = new_bytes(bucket.nbytes, self._device), bucket, uuid.uuid4().hex
        on_device = all(tensor.device == self._device for tensor in tensors.values())
        await in_own_thread(partial(fill if on_device else fill_from_host, self._flat, bucket, tensors))

    def message(self) -> str:
        """The message about the filled buffer, for the server's loader: the handle and the layout, or only the key if
        the server has opened the buffer."""
        assert self._flat is not None
        assert self._bucket is not None
        if self._is_open:
            return pickled([(json.dumps({"key": self._key}), torch.empty(0))])
        layout = [(entry.name, entry.dtype, entry.shape, start) for entry, start in self._bucket.placed()]
        self._handle = Handle(self._flat)
        return pickled([(json.dumps({"key": self._key, "tensors": layout}), self._handle)])

    def opened(self) -> None:
        """Note that the server has opened the buffer."""
        self._is_open = True

    def drop(self) -> None:
        """Free the buffer. The server will get another one."""
        if self._handle is not None:
            self._handle.release()
        self._flat = self._bucket = self._handle = None
        self._is_open = False
