"""Stores a batch as one safetensors file, which cannot contain code, unlike a pickle.

Tensors are under `batch/NAME`; a nested tensor has its values there, and its offsets under `offsets/NAME`. Arrays and
`meta_info` are one msgpack value under `about`. Null, booleans, numbers, texts and bytes are stored as such. Any other
value, such as a list or an integer beyond 64 bits, is a list whose first element is a mark for the type (`_Mark`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.compat.verl.batches.fields import check_rows
from asyncrl.compat.verl.batches.nested import nested_of
from asyncrl.compat.verl.batches.nested import parts as nested_parts
from asyncrl.compat.verl.batches.tensors import TensorBatch
from asyncrl.errors import DataError, DataProtoError
from asyncrl.machine.files import partial_name, save_tensors, sync

Array = np.ndarray[Any, Any]
FORMAT = 1
ABOUT = "about"
_TENSOR_PREFIX = "batch/"
_OFFSETS_PREFIX = "offsets/"
_PLAIN_KINDS = "biufcSUMm"
"""The kinds of arrays whose elements have a fixed size in bytes: numbers, texts and times."""
_SMALL = range(-(2**63), 2**64)
"""The integers that msgpack can encode."""


class _Mark(StrEnum):
    LIST = "list"
    TUPLE = "tuple"
    MAP = "map"
    ARRAY = "array"
    OBJECTS = "objects"
    SCALAR = "scalar"
    TENSOR = "tensor"
    INT = "int"


def write_batch(path: Path, batch: TensorBatch | None, arrays: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Write the parts of a batch. Raises DataProtoError: a value cannot be saved. Raises OSError: the write fails."""
    parts: dict[str, Any] = {
        "format": FORMAT,
        "ragged": {},
        "rows": None if batch is None else len(batch),
        "names": list({} if batch is None else batch.keys()),
        "non_tensor_batch": _packed(dict(arrays), "non_tensor_batch"),
        "meta_info": _packed(dict(about), "meta_info"),
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in ({} if batch is None else batch).items():
        if tensor.is_nested:
            tensor, offsets, parts["ragged"][name] = nested_parts(tensor)
            tensors[_OFFSETS_PREFIX + name] = _alone(offsets)
        # safetensors refuses tensors that share memory, such as an expanded batch, so each tensor is copied.
        tensors[_TENSOR_PREFIX + name] = _alone(tensor)
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(parts)), dtype=torch.uint8)
    partial = partial_name(path)
    save_tensors({**tensors, ABOUT: text}, partial)
    sync(partial)
    partial.replace(path)


def read_batch(path: Path) -> tuple[TensorBatch | None, dict[str, Array], dict[str, Any]]:
    """The parts of a batch, on the CPU. Raises DataError: the file is missing, damaged, or not from `write_batch`."""
    if not path.exists():
        raise DataError(f"{path}: the file does not exist")
    try:
        tensors = load_file(path)
        parts = msgspec.msgpack.decode(tensors.pop(ABOUT).numpy().tobytes())
        if parts["format"] != FORMAT:
            raise ValueError(f"its format is {parts['format']}, this asyncrl reads {FORMAT}")
        named = {name: tensors[_TENSOR_PREFIX + name] for name in parts["names"]}
        for name, dimension in parts.get("ragged", {}).items():
            named[name] = _nested(named[name], tensors[_OFFSETS_PREFIX + name], dimension)
        batch = None if parts["rows"] is None else TensorBatch(named, _count(parts["rows"]))
        arrays, about = (_map_of(parts[name]) for name in ("non_tensor_batch", "meta_info"))
        check_rows(batch, arrays)
        return batch, arrays, about
    except (
        DataProtoError,
        OSError,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        # torch raises RuntimeError for content that does not fit its shape. RecursionError is a RuntimeError too.
        raise DataError(
            f"{path} is not a whole batch of save_to_disk: {error}. verl's own files are pickles, which may run any "
            "program and are never read: load them with verl, and build a batch from their fields"
        ) from error


def packed_fields(fields: Mapping[str, Any]) -> bytes:
    """The fields as bytes. Raises DataProtoError: a value cannot be saved."""
    return msgspec.msgpack.encode({name: _packed(value, name) for name, value in fields.items()})


def unpacked_fields(content: bytes) -> dict[str, Any]:
    """The fields from the bytes of `packed_fields`."""
    return {name: _unpacked(value) for name, value in msgspec.msgpack.decode(content).items()}


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _packed(value: Any, where: str) -> Any:
    """`value` as lists, texts and numbers. Raises DataProtoError, which names `where`: a value cannot be saved."""
    match value:
        case None | bool() | float() | str() | bytes() if not isinstance(value, np.generic):
            return value
        case int() if not isinstance(value, np.generic):
            return int(value) if value in _SMALL else [_Mark.INT, str(value)]
        case list() | tuple():
            mark = _Mark.LIST if isinstance(value, list) else _Mark.TUPLE
            return [mark, *(_packed(each, f"{where}[{index}]") for index, each in enumerate(value))]
        case Mapping():
            pairs = [[_packed(key, where), _packed(each, f"{where}[{key!r}]")] for key, each in value.items()]
            return [_Mark.MAP, *pairs]
        case Tensor() if not value.is_nested:
            alone = _alone(value)
            return [_Mark.TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape), _bytes_of(alone)]
        case np.ndarray() if value.dtype == object:
            flat = [_packed(each, f"{where}[{index}]") for index, each in enumerate(value.flat)]
            return [_Mark.OBJECTS, list(value.shape), flat]
        case np.ndarray() | np.generic() if value.dtype.kind in _PLAIN_KINDS:
            mark = _Mark.ARRAY if isinstance(value, np.ndarray) else _Mark.SCALAR
            return [mark, value.dtype.str, list(value.shape), value.tobytes()]
    raise DataProtoError(
        f"{where} is a {type(value).__name__}, which cannot be saved; numbers, texts, bytes, lists, mappings, arrays "
        "and tensors can"
    )


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _unpacked(value: Any) -> Any:
    """The inverse of `_packed`. Raises LookupError, TypeError or ValueError: `_packed` did not make the value."""
    if not isinstance(value, list):
        return value
    mark, *rest = value
    return _READERS[mark](*rest)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"it has {value!r:.100} rows")
    return value


def _nested(values: Tensor, offsets: Tensor, dimension: int) -> Tensor:
    # torch does not check the offsets, and would read beyond the values.
    ends = [int(each) for each in offsets]
    if (
        not 1 <= dimension <= values.ndim
        or ends != sorted(ends)
        or [*ends[:1], *ends[-1:]]
        != [
            0,
            values.shape[dimension - 1],
        ]
    ):
        raise ValueError(f"{list(values.shape)} values do not divide into rows at {ends[:10]}")
    return nested_of(values, offsets, dimension)


def _map_of(value: Any) -> dict[Any, Any]:
    found = _unpacked(value)
    if not isinstance(found, dict):
        raise TypeError(f"a mapping is needed, not a {type(found).__name__}")
    return found


def _map(*pairs: Any) -> dict[Any, Any]:
    return {_unpacked(key): _unpacked(each) for key, each in pairs}


def _array(kind: str, shape: list[int], content: bytes) -> Array:
    dtype = np.dtype(kind)
    # With elements of 0 bytes, a small file could become an array of any length.
    if dtype.kind not in _PLAIN_KINDS or not dtype.itemsize or len(content) != dtype.itemsize * prod(shape):
        raise ValueError(f"an array of {kind}{shape} has {len(content)} bytes")
    if dtype.kind == "U" and (np.frombuffer(content, f"{dtype.byteorder}u4") > sys.maxunicode).any():
        raise ValueError(f"an array of {kind}{shape} has characters beyond Unicode")
    return np.ndarray(shape, dtype, content).copy()


def _objects(shape: list[int], flat: list[Any]) -> Array:
    array = np.empty(len(flat), dtype=object)
    for index, each in enumerate(flat):
        array[index] = _unpacked(each)
    return array.reshape(shape)


def _tensor(kind: str, shape: list[int], content: bytes) -> Tensor:
    dtype = getattr(torch, kind)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{kind} is not a dtype of tensors")
    elements = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype) if content else torch.empty(0)
    return elements.to(dtype).reshape(shape)


_READERS: Mapping[str, Callable[..., Any]] = {
    _Mark.LIST: lambda *values: [_unpacked(each) for each in values],
    _Mark.TUPLE: lambda *values: tuple(_unpacked(each) for each in values),
    _Mark.MAP: _map,
    _Mark.ARRAY: _array,
    _Mark.SCALAR: lambda *values: _array(*values)[()],
    _Mark.OBJECTS: _objects,
    _Mark.TENSOR: _tensor,
    _Mark.INT: int,
}
