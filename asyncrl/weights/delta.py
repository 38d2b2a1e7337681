"""Deltas: the changes between two versions of the weights, bit for bit, in far fewer bytes than the weights.

A tensor that changed in few places is patched. A patch has the gaps between changed elements, as the narrowest unsigned
integers that hold them, and the differences between new and old elements. Elements are subtracted as unsigned integers
modulo 2^bits, so every bit pattern (nan payloads, -0.0) is restored exactly.

Gaps and differences are split into byte planes, most of which are nearly constant, and compressed with zstd. A tensor
that changed in many places travels whole. The manifest of the new version has the checksums of the patched tensors.

Deltas form chains: a receiver that has missed several versions applies several deltas in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.manifest import (
    DTYPES,
    WHOLE,
    DeltaHeader,
    Manifest,
    Map,
    Patch,
    TensorSpec,
    WeightSnapshot,
    as_tensor,
    bytes_of,
    checksum,
    new_bytes,
)

MAX_DENSITY = 0.25
"""A tensor travels whole if a larger share of its elements changed."""

SHARED_BYTES = 1 << 20
"""Tensors of fewer bytes are copied even if they did not change. Otherwise a small tensor could keep a large buffer of
many tensors in memory."""

GAPS = (1, 2, 4)
"""The possible widths of a gap, in bytes."""

_BLOCK = 1 << 18
_CODEC = "zstd"

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A header and its payload uint8[nbytes]."""

    header: DeltaHeader
    payload: Bytes


def same_layout(old: Manifest, new: Manifest) -> bool:
    """True if both have tensors of the same names, shapes and types, so that a delta is possible."""

    def layout(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors]

    return layout(old) == layout(new)


def diff(old: WeightSnapshot, new: WeightSnapshot, each: Map = map) -> Delta:
    """Compute the delta from `old` to `new`. `each` is called like the builtin `map`, and may work on several tensors
    at once.

    Raises WeightsError: the tensors of the two versions differ in names, shapes or types.
    """
    if not same_layout(old.manifest, new.manifest):
        raise WeightsError("there is no delta between versions with different tensors")
    specs = new.manifest.tensors
    changed = [i for i, spec in enumerate(specs) if spec.checksum != old.manifest.tensors[i].checksum]

    def encode(index: int) -> tuple[int, int, Bytes]:
        size = DTYPES[specs[index].dtype].itemsize
        return _encode(old.buffers[index].view(f"u{size}"), new.buffers[index].view(f"u{size}"))

    encoded = list(each(encode, changed))
    patches = tuple(
        Patch(index, count, gap, len(data)) for index, (count, gap, data) in zip(changed, encoded, strict=True)
    )
    payload = np.concatenate([data for *_, data in encoded]) if encoded else np.zeros(0, np.uint8)
    return Delta(DeltaHeader(old.manifest.digest, new.manifest.digest, patches), payload)


def apply(
    base: Mapping[str, torch.Tensor], held: Manifest, target: Manifest, chain: Sequence[Delta], each: Map = map
) -> dict[str, torch.Tensor]:
    """Make the tensors of `target`: apply a chain of deltas to `base`, which has the tensors of `held`.

    `each` is called like the builtin `map`, and may work on several tensors at once. Large tensors that do not change
    are shared with `base`, which is not modified.

    Raises WeightsError: the chain does not begin at `held` or end at `target`, or the results do not have the checksums
    of `target`; WireError: a delta is malformed.
    """
    places = [held.digest, *(delta.header.result for delta in chain)]
    if [delta.header.base for delta in chain] != places[:-1] or places[-1] != target.digest:
        raise WeightsError(
            f"the deltas do not lead from the weights here (version {held.version}) to version {target.version}"
        )
    if not same_layout(held, target):
        raise WeightsError(f"version {target.version} has other tensors than version {held.version}")
    patches = _by_tensor(chain, len(target.tensors))

    def make(index: int) -> torch.Tensor:
        old, new = held.tensors[index], target.tensors[index]
        tensor, own = base[new.name], old.checksum
        if index in patches or new.nbytes < SHARED_BYTES:
            data = new_bytes(new.nbytes)
            data.copy_(torch.from_numpy(bytes_of(tensor.contiguous())))
            for patch, payload in patches.get(index, ()):
                _patch(data.numpy(), new, patch, payload)
            tensor, own = as_tensor(data, new.dtype, new.shape), checksum(data.numpy())
        if own != new.checksum:
            raise WeightsError(
                f"a delta to version {target.version} gave a wrong result: the checksum of {new.name} differs"
            )
        return tensor

    made = each(make, range(len(target.tensors)))
    return {spec.name: tensor for spec, tensor in zip(target.tensors, made, strict=True)}


def _by_tensor(chain: Sequence[Delta], tensors: int) -> dict[int, list[tuple[Patch, Bytes]]]:
    """Map the index of each tensor that changes to its patches, in the chain's order."""
    found: dict[int, list[tuple[Patch, Bytes]]] = {}
    for delta in chain:
        for patch, data in _parts(delta):
            if patch.tensor >= tensors:
                raise WireError(f"a delta patches tensor {patch.tensor} of {tensors}")
            found.setdefault(patch.tensor, []).append((patch, data))
    return found


def _encode(old: Elements, new: Elements) -> tuple[int, int, Bytes]:
    """Return the number of changes, the width of gaps and the bytes of a patch. `old` and `new` are unsigned integers.

    This needs memory for the patch, for its byte planes, and 4 bytes for each change.
    """
    found, count, widest = _find(old, new)
    width = next((width for width in GAPS if widest < 256**width), WHOLE)
    if count > MAX_DENSITY * len(new) or width == WHOLE:
        return count, WHOLE, new.view(np.uint8)
    planes = np.empty((width + new.itemsize, count), np.uint8)
    last, done = -1, 0
    while found:
        start, places = found.popleft()
        where = places.astype(np.int64) + start
        rows = planes[:, done : done + len(where)]
        rows[:width] = _plane_rows((np.diff(where, prepend=last) - 1).astype(f"u{width}"))
        rows[width:] = _plane_rows(new[where] - old[where])
        last, done = where[-1], done + len(where)
    packed = pa.compress(planes.reshape(-1), codec=_CODEC)
    return count, width, np.frombuffer(packed, np.uint8)


def _find(old: Elements, new: Elements) -> tuple[deque[tuple[int, NDArray[np.uint32]]], int, int]:
    """Find the elements that differ. Returns their positions, their count, and the widest gap between two consecutive
    positions. The positions come block by block, each block with its start. If too many elements differ for a patch,
    only the count is right.
    """
    found: deque[tuple[int, NDArray[np.uint32]]] = deque()
    count, widest, last = 0, 0, -1
    for start in range(0, len(new), _BLOCK):
        differ = old[start : start + _BLOCK] != new[start : start + _BLOCK]
        count += int(np.count_nonzero(differ))
        if count > MAX_DENSITY * len(new):
            found.clear()
        elif len(places := np.flatnonzero(differ)):
            gaps = np.diff(places, prepend=last - start) - 1
            widest, last = max(widest, int(gaps.max())), start + int(places[-1])
            found.append((start, places.astype(np.uint32)))
    return found, count, widest


def _patch(target: Bytes, spec: TensorSpec, patch: Patch, data: Bytes) -> None:
    """Change `target` in place. Raises WireError: the patch does not fit the tensor."""
    size = DTYPES[spec.dtype].itemsize
    elements = math.prod(spec.shape)
    if patch.gap == WHOLE:
        if len(data) != len(target):
            raise WireError(f"{spec.name} travels whole with {len(data)} bytes; it has {len(target)}")
        target[:] = data
        return
    if not 0 < patch.count <= elements:
        raise WireError(f"a patch changes {patch.count} of the {elements} elements of {spec.name}")
    planes = _decompress(data, patch.count * (patch.gap + size), spec.name).reshape(-1, patch.count)
    view, last = target.view(f"u{size}"), -1
    for start in range(0, patch.count, _BLOCK):
        rows = planes[:, start : start + _BLOCK]
        where = np.cumsum(_joined(rows[: patch.gap]).astype(np.int64) + 1) + last
        last = int(where[-1])
        if last >= elements:
            raise WireError(f"a patch reaches element {last} of {spec.name}, which has {elements}")
        view[where] += _joined(rows[patch.gap :])


def _parts(delta: Delta) -> Iterator[tuple[Patch, Bytes]]:
    if delta.header.nbytes != len(delta.payload):
        raise WireError(f"a delta announces {delta.header.nbytes} bytes and has {len(delta.payload)}")
    start = 0
    for patch in delta.header.patches:
        yield patch, delta.payload[start : start + patch.nbytes]
        start += patch.nbytes


def _decompress(data: Bytes, size: int, name: str) -> Bytes:
    try:
        raw = pa.decompress(data, decompressed_size=size, codec=_CODEC)
    except (pa.ArrowException, OSError) as error:
        raise WireError(f"the patch of {name} cannot be decompressed: {error}") from error
    if len(raw) != size:
        raise WireError(f"the patch of {name} has {len(raw)} bytes instead of {size}")
    return np.frombuffer(raw, np.uint8)


def _plane_rows(values: Elements) -> Bytes:
    """Return the byte planes uint8[size, n] of n values: first bytes, second bytes, and so on."""
    return values.view(np.uint8).reshape(len(values), -1).T


def _joined(planes: Bytes) -> Elements:
    """Return the n unsigned integers that have these byte planes uint8[size, n]."""
    return np.ascontiguousarray(planes.T).view(f"u{len(planes)}")[:, 0]
