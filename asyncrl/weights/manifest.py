"""What one version of the weights consists of, and the checks that make an update all or nothing.

Tensors travel as raw bytes under the name of their dtype; a tensor is cut into chunks of at most `chunk_bytes`. The
checksum of a tensor is the XXH3-64 of its bytes: it guards against damage, not against an adversary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.errors import WeightsError, WireError

MAX_CHUNK_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 64 << 20
"""Of a manifest with its deltas: 90 bytes a tensor, and a mixture of experts has up to a hundred thousand tensors."""

MAX_TOGETHER = 64


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version: `dtype` is a key of DTYPES, `checksum` that of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """The bytes [start, stop) of the part with that index: of a tensor, or of a delta's payload."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of `version`, in the order in which they travel."""

    version: int
    chunk_bytes: int
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def digest(self) -> str:
        """A name for the contents: names, dtypes, shapes and checksums, whatever the version."""
        rows = repr([(spec.name, spec.dtype, spec.shape, spec.checksum) for spec in self.tensors])
        return hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()

    def check_covers(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises WeightsError unless names and shapes are exactly those in `expected`."""
        check_covers(self.version, {spec.name: spec.shape for spec in self.tensors}, expected)

    def body(self) -> dict[str, Any]:
        """As plain values for a message."""
        tensors = [[spec.name, spec.dtype, list(spec.shape), spec.checksum] for spec in self.tensors]
        return {"version": self.version, "chunk_bytes": self.chunk_bytes, "tensors": tensors}


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


def chunks(sizes: Iterable[int], chunk_bytes: int) -> Iterator[Chunk]:
    """Every chunk of parts of `sizes` bytes, part after part and in the order of their bytes."""
    for index, size in enumerate(sizes):
        for start in range(0, size, chunk_bytes):
            yield Chunk(index, start, min(start + chunk_bytes, size))


def together(pieces: Iterable[Chunk], nbytes: int) -> Iterator[list[Chunk]]:
    """The chunks in their order, as many at once as have at most `nbytes`, and are at most MAX_TOGETHER."""
    group: list[Chunk] = []
    left = nbytes
    for piece in pieces:
        size = piece.stop - piece.start
        if group and (size > left or len(group) == MAX_TOGETHER):
            yield group
            group, left = [], nbytes
        group.append(piece)
        left -= size
    if group:
        yield group


def read_manifest(body: Mapping[str, Any]) -> Manifest:
    """The manifest in `body`. Raises WireError where it is malformed."""
    match body:
        case {"version": int(version), "chunk_bytes": int(size), "tensors": list(rows)} if 0 < size <= MAX_CHUNK_BYTES:
            tensors = tuple(_read_spec(row) for row in rows)
        case _:
            raise WireError("a manifest must hold a version, chunk_bytes and tensors")
    if len({spec.name for spec in tensors}) != len(tensors):
        raise WireError(f"the manifest of version {version} names a tensor twice")
    return Manifest(version, size, tensors)


def _read_spec(row: Any) -> TensorSpec:
    match row:
        case [str(name), str(dtype), list(shape), int(checksum)] if dtype in DTYPES:
            if all(isinstance(size, int) and size >= 0 for size in shape):
                return TensorSpec(name, dtype, tuple(shape), checksum)
    raise WireError(f"a tensor must be [name, dtype, shape, checksum] with a known dtype, not {row!r:.100}")


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes uint8[n] of a contiguous CPU tensor of any dtype, sharing its memory."""
    view: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def as_tensor(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes are `data`, uint8[n], which it shares."""
    # A view of no bytes cannot change its dtype.
    whole = data.view(DTYPES[dtype]) if len(data) else data.new_empty(0, dtype=DTYPES[dtype])
    return whole.view(shape)


def new_bytes(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Fresh memory uint8[nbytes]. On the CPU NumPy asks for huge pages from 4 MB on, which torch does not: without
    them, faults of single pages take longer than a transfer."""
    if device is not None and device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.empty(nbytes, np.uint8))


def checksum(data: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSnapshot:
    """One version in memory: its manifest, and each tensor's bytes in the manifest's order."""

    manifest: Manifest
    buffers: tuple[NDArray[np.uint8], ...]


Map = Callable[..., Iterator[Any]]
"""What the built-in `map` does, or a pool's: the work over tensors frees the GIL."""


def take_snapshot(
    version: int, tensors: Mapping[str, torch.Tensor], chunk_bytes: int, each: Map = map
) -> WeightSnapshot:
    """A snapshot that shares the memory of contiguous tensors; the checksums are computed here, mapped by `each`."""
    buffers = tuple(bytes_of(tensor.contiguous()) for tensor in tensors.values())
    specs = tuple(
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), own)
        for (name, tensor), own in zip(tensors.items(), each(checksum, buffers), strict=True)
    )
    return WeightSnapshot(Manifest(version, chunk_bytes, specs), buffers)
