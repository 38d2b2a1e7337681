"""Buckets: flat buffers of bounded size, each shared by many tensors. They replace many small transfers by a few large
ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.weights.manifest import DTYPES, TensorSpec, as_tensor, new_bytes

ALIGNMENT = 64
TIGHT = 1
"""The alignment of buckets without gaps. Their tensors must be sorted from the widest dtype to the narrowest, so that
views are aligned."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors packed in order in one buffer of `nbytes`, each at a multiple of `alignment`."""

    entries: tuple[TensorSpec, ...]
    alignment: int = ALIGNMENT

    @property
    def nbytes(self) -> int:
        return sum(_padded(entry.nbytes, self.alignment) for entry in self.entries)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors, which are views of `flat`, uint8[nbytes]."""
        return {
            entry.name: as_tensor(flat[start : start + entry.nbytes], entry.dtype, entry.shape)
            for entry, start in self.placed()
        }

    def placed(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield every tensor and the byte at which it begins."""
        start = 0
        for entry in self.entries:
            yield entry, start
            start += _padded(entry.nbytes, self.alignment)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredBucket:
    """A bucket and its buffer `flat`. A buffer on the CPU is never overwritten, so its tensors may be kept. A buffer
    on a GPU is overwritten by the next bucket."""

    bucket: Bucket
    flat: torch.Tensor


def plan_buckets(entries: Sequence[TensorSpec], bucket_bytes: int, alignment: int = ALIGNMENT) -> list[Bucket]:
    """Put `entries`, in their order, into buckets of at most `bucket_bytes`. A tensor with more bytes gets a bucket for
    itself."""
    return _filled([[entry] for entry in entries], bucket_bytes, alignment)


def tight_buckets(
    entries: Sequence[TensorSpec], bucket_bytes: int, group_of: Callable[[str], str] = str
) -> list[Bucket]:
    """Put `entries` into buckets without gaps, the widest dtypes first. Tensors form a group if they have the
    same dtype, and `group_of` returns the same text for their names. A group is never split. A bucket is larger than
    `bucket_bytes` only if it has a single group.
    """
    groups: dict[tuple[str, str], list[TensorSpec]] = {}
    for entry in sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize):
        groups.setdefault((entry.dtype, group_of(entry.name)), []).append(entry)
    return _filled(groups.values(), bucket_bytes, TIGHT)


def _filled(groups: Iterable[Sequence[TensorSpec]], bucket_bytes: int, alignment: int) -> list[Bucket]:
    """Put groups, in their order, into buckets. No group is split."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for group in groups:
        size = sum(_padded(entry.nbytes, alignment) for entry in group)
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].extend(group)
        room -= size
    return [Bucket(tuple(each), alignment) for each in buckets]


def flatten(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Copy the bucket's tensors into a new buffer uint8[nbytes] on their device. Returns once the copies are
    complete."""
    flat = new_bytes(bucket.nbytes, tensors[bucket.entries[0].name].device)
    fill(flat, bucket, tensors)
    return flat


def fill(flat: torch.Tensor, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the bucket's tensors into its buffer, which is on their device. Returns once the copies are complete."""
    for name, view in bucket.views(flat).items():
        view.copy_(tensors[name].detach())
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def on_host(filled: GatheredBucket) -> dict[str, torch.Tensor]:
    """Return a bucket's tensors in CPU memory. Tensors on a GPU are copied to pinned memory."""
    flat = filled.flat
    if flat.is_cuda:
        flat = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=True).copy_(flat)
    return filled.bucket.views(flat)


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
