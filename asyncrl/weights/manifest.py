"""The manifest of a version lists all of its tensors with checksums. An update is all or nothing, because receivers
check what arrives against the manifest.

Tensors travel as raw bytes, in chunks of at most `chunk_bytes`. The manifest has the name of their dtype. The checksum
of a tensor is the XXH3-64 of its bytes: it guards against damage, not against an adversary.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.errors import WeightsError
from asyncrl.weights.canary import Canary

MAX_CHUNK_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 64 << 20
"""The maximum size of a manifest with the headers of its deltas. A tensor takes about 90 bytes of it, and a mixture of
experts has up to a hundred thousand tensors."""

WHOLE = 0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor without its contents. `dtype` is a key of DTYPES. `checksum` is 0 if it is not known."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    checksum: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name:.50} has the unknown dtype {self.dtype:.50}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of `tensors` in their order, without checksums."""
    return tuple(TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items())


class Patch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change of some elements in one tensor.

    - `tensor`: the index of the tensor in the manifest.
    - `count`: the number of changed elements.
    - `gap`: the number of bytes that store the gap between two changed elements, or WHOLE if the patch has the whole
      tensor.
    - `nbytes`: the number of bytes of the patch in the payload.
    """

    tensor: Size
    count: Size
    gap: Literal[0, 1, 2, 4]
    nbytes: Size


class DeltaHeader(msgspec.Struct, frozen=True):
    """The patches that make the version with digest `result` from the version with digest `base`.

    The patches are in the payload's order, with at most one for each tensor. Digests identify manifests.
    """

    base: str
    result: str
    patches: tuple[Patch, ...]

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.patches)

    @property
    def changed(self) -> int:
        """The number of elements that change."""
        return sum(patch.count for patch in self.patches)


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of `version`, in the order in which they travel.

    If there are `deltas`, they are sent instead of the tensors. Applied in order to the receiver's version, they make
    the tensors. An engine must repeat the `canary`, if there is one, before it serves the version.

    Raises ValueError: two tensors have one name, or the deltas are larger than the tensors.
    """

    version: int
    chunk_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_BYTES)]
    tensors: tuple[TensorSpec, ...]
    deltas: tuple[DeltaHeader, ...] = ()
    canary: Canary | None = None

    def __post_init__(self) -> None:
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError(f"the manifest of version {self.version} names a tensor twice")
        if self.deltas and sum(header.nbytes for header in self.deltas) > self.nbytes:
            raise ValueError("the deltas are larger than the weights")

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def digest(self) -> str:
        """A name for the contents: names, dtypes, shapes and checksums. It does not depend on the version's number."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.tensors), digest_size=16).hexdigest()

    def check_covers(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises WeightsError unless the names and shapes of the tensors are exactly those in `expected`."""
        check_covers(self.version, {spec.name: spec.shape for spec in self.tensors}, expected)


def check_covers(version: int, offered: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError unless the tensors of `version` have exactly the names and shapes in `expected`."""
    faults = {
        "missing": expected.keys() - offered.keys(),
        "unknown": offered.keys() - expected.keys(),
        "misshapen": {name for name in offered.keys() & expected.keys() if offered[name] != tuple(expected[name])},
    }
    found = [f"{len(names)} {fault} ({', '.join(sorted(names)[:3])})" for fault, names in faults.items() if names]
    if found:
        raise WeightsError(
            f"version {version} does not fit the engine's model: {'; '.join(found)}. "
            "Learner and engine must load the same model"
        )


def places(edges: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Find the bytes [start, stop) of concatenated arrays. Yields the index of each array that has some of these bytes,
    and the slice of the array in which they are.

    Array i has the bytes [edges[i], edges[i + 1]) of the whole.
    """
    index = bisect_right(edges, start) - 1
    while start < stop:
        end = min(stop, edges[index + 1])
        if end > start:
            yield index, slice(start - edges[index], end - edges[index])
        start, index = end, index + 1


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes uint8[n] of a contiguous CPU tensor of any dtype, sharing its memory."""
    view: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def as_tensor(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that is a view of the bytes `data`, uint8[n]."""
    # A view cannot change the dtype of an empty tensor.
    whole = data.view(DTYPES[dtype]) if len(data) else data.new_empty(0, dtype=DTYPES[dtype])
    return whole.view(shape)


def new_bytes(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Allocate uint8[nbytes]."""
    if device is not None and device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # NumPy requests huge pages from 4 MB on, and torch does not. Without huge pages, page faults take longer than a
    # transfer.
    return torch.from_numpy(np.empty(nbytes, np.uint8))


def checksum(data: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSnapshot:
    """One version in memory: its manifest, and each tensor's bytes in the manifest's order."""

    manifest: Manifest
    buffers: tuple[NDArray[np.uint8], ...]


Map = Callable[..., Iterator[Any]]
"""The built-in `map`, or the `map` of a thread pool. A pool works on several tensors at once, since work on tensors
releases the GIL."""


def take_snapshot(
    version: int,
    tensors: Mapping[str, torch.Tensor],
    chunk_bytes: int,
    each: Map = map,
    canary: Canary | None = None,
) -> WeightSnapshot:
    """Take a snapshot of `tensors`. Contiguous tensors are not copied: the snapshot shares their memory. `each` is
    called like the builtin `map`, and may compute several checksums at once."""
    buffers = tuple(bytes_of(tensor.contiguous()) for tensor in tensors.values())
    specs = tuple(
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), own)
        for (name, tensor), own in zip(tensors.items(), each(checksum, buffers), strict=True)
    )
    return WeightSnapshot(Manifest(version, chunk_bytes, specs, canary=canary), buffers)
