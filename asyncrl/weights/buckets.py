"""How tensors share flat buffers: so many small transfers become a few large ones, and memory is bounded by buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.weights.manifest import DTYPES, as_tensor, new_bytes

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor without its contents; `dtype` is a key of manifest.DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors one after the other in one buffer of `nbytes`, each at a multiple of ALIGNMENT."""

    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(_padded(entry.nbytes) for entry in self.entries)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `flat`, uint8[nbytes], which they share."""
        tensors, start = {}, 0
        for entry in self.entries:
            tensors[entry.name] = as_tensor(flat[start : start + entry.nbytes], entry.dtype, entry.shape)
            start += _padded(entry.nbytes)
        return tensors


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A bucket and its buffer."""

    bucket: Bucket
    flat: torch.Tensor


def plan_buckets(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """`entries` in their order, in buckets of at most `bucket_bytes`; a larger tensor has one for itself."""
    buckets: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if _padded(entry.nbytes) > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(entry)
        room -= _padded(entry.nbytes)
    return [Bucket(tuple(each)) for each in buckets]


def on_host(filled: Filled) -> dict[str, torch.Tensor]:
    """The tensors of a bucket as copies on the CPU, in pinned memory where they come from a GPU."""
    nbytes = filled.bucket.nbytes
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if filled.flat.is_cuda else new_bytes(nbytes)
    return filled.bucket.views(host.copy_(filled.flat))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
