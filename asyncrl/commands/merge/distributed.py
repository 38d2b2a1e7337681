"""Reads Megatron's distributed checkpoints in the format `torch_dist`: a folder with chunks of tensors.

The file `.metadata` lists the shape of each tensor, and for each of its chunks the offset in the tensor and the
position in a `.distcp` file. The offsets suffice to merge the chunks of any number of tensor, pipeline and expert
parallel ranks. Chunks are read by `torch.load` with `weights_only`, which runs no code from them. `.metadata` is a
plain pickle, so it is read by an unpickler that allows only the classes that these files need.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from asyncrl.errors import CheckpointError

BACKEND = "torch_dist"
_DESCRIPTION = "metadata.json"
_METADATA = ".metadata"


def distributed_folder(folder: Path) -> Path | None:
    """The folder with the model's chunks, within a checkpoint of verl or Megatron; None if there are no chunks.

    Raises CheckpointError: the format is not supported.
    """
    found = (folder / place for place in ("", "dist_ckpt", "model/dist_ckpt"))
    place = next((each for each in found if (each / _DESCRIPTION).is_file()), None)
    if place is None:
        return None
    try:
        description = json.loads((place / _DESCRIPTION).read_text())
        backend = description["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{place / _DESCRIPTION} cannot be read: {error!r}") from error
    if backend != BACKEND:
        raise CheckpointError(f"{place} has the format {backend!r}; only {BACKEND} can be merged")
    return place


class DistributedTensors:
    """The tensors in a `torch_dist` folder. Raises CheckpointError: the file `.metadata` cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / _METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            self._described: Mapping[str, Any] = {
                str(name): each for name, each in metadata.state_dict_metadata.items()
            }
            self._stored: Mapping[Any, Any] = dict(metadata.storage_data)
        except CheckpointError:
            raise
        except Exception as error:
            # A damaged pickle may raise any exception.
            raise CheckpointError(f"{path} cannot be read: {error!r}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each tensor by name."""
        kind = described.TensorStorageMetadata
        return {name: tuple(each.size) for name, each in self._described.items() if isinstance(each, kind)}

    def read(self, name: str) -> Tensor:
        """A tensor, merged from its chunks. Raises CheckpointError: chunks are missing, damaged or overlapping."""
        try:
            return self._read(name, self._described[name])
        except CheckpointError:
            raise
        except Exception as error:
            # `.metadata` may contain anything, such as a size larger than the memory.
            raise CheckpointError(f"{name} cannot be read from {self._folder}: {error!r}") from error

    def _read(self, name: str, description: Any) -> Tensor:
        _check_cover(name, description.size, description.chunks)
        whole = torch.empty(description.size, dtype=description.properties.dtype)
        for chunk in description.chunks:
            part = self._chunk(name, chunk)
            if part.shape != torch.Size(chunk.sizes):
                raise CheckpointError(f"a chunk of {name} has the shape {list(part.shape)}, not {list(chunk.sizes)}")
            if part.dtype != whole.dtype:
                raise CheckpointError(f"a chunk of {name} has the dtype {part.dtype}, but the tensor has {whole.dtype}")
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = part
        return whole

    def _chunk(self, name: str, chunk: Any) -> Tensor:
        try:
            stored = self._stored[described.MetadataIndex(name, chunk.offsets)]
        except KeyError:
            raise CheckpointError(f"{self._folder / _METADATA} lacks the position of a chunk of {name}") from None
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"a chunk of {name} is in {stored.relative_path!r}, outside of {self._folder}")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{name} is stored as {list(stored.transform_descriptors)}, which is not supported")
        path = self._folder / stored.relative_path
        try:
            with path.open("rb") as file:
                file.seek(stored.offset)
                content = io.BytesIO(file.read(stored.length))
            part = torch.load(content, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{name} cannot be read from {path}: {error}") from error
        if not isinstance(part, Tensor):
            raise CheckpointError(f"{path} has a {type(part).__name__} instead of the tensor {name}")
        return part


def _check_cover(name: str, size: Sequence[int], chunks: Sequence[Any]) -> None:
    """Raises CheckpointError: an element of a tensor is in no chunk, or in several chunks."""
    edges = []
    for dim, length in enumerate(size):
        starts = [each.offsets[dim] for each in chunks]
        ends = [each.offsets[dim] + each.sizes[dim] for each in chunks]
        edges.append(sorted({0, length, *starts, *ends}))
    if any(each[0] < 0 or each[-1] > length for each, length in zip(edges, size, strict=True)):
        raise CheckpointError(f"a chunk of {name} is outside of the tensor's shape {list(size)}")
    # The edges of all chunks divide the tensor into boxes. `times` counts the chunks that cover each box.
    times = np.zeros([len(each) - 1 for each in edges], np.int32)
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    for each in chunks:
        spans = zip(numbers, each.offsets, each.sizes, strict=True)
        times[tuple(slice(number[start], number[start + length]) for number, start, length in spans)] += 1
    if (times != 1).any():
        fault = "lack a part of it" if times.min() == 0 else "overlap"
        raise CheckpointError(f"the {len(chunks)} chunks of {name} {fault}: a rank's part is missing or duplicated")


class _FlattenedTensor:
    """A stand-in for Megatron's `MCoreMetadata`, which describes flattened tensors of an optimizer."""


_PLANS = (planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData)
"""Classes in which Megatron caches its plan of saving, so that the next save is faster."""
_CLASSES: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _FlattenedTensor,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    **{("torch.distributed.checkpoint.planner", each.__name__): each for each in _PLANS},
    **{
        ("torch.distributed.checkpoint.metadata", each.__name__): each
        for each in (
            described.Metadata,
            described.MetadataIndex,
            described.TensorStorageMetadata,
            described.BytesStorageMetadata,
            described.ChunkStorageMetadata,
            described.TensorProperties,
            described.StorageMeta,
            described._MEM_FORMAT_ENCODING,
        )
    },
}


class _MetadataUnpickler(pickle._Unpickler):
    """Makes only objects of the classes in _CLASSES, and sets attributes only of such objects.

    Without this limit, a pickle could replace a method of one of the classes, for example of a path. Only pickle's
    pure-Python unpickler allows overriding `load_build`.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        made = self.stack[-2]  # type: ignore[attr-defined]
        if type(made) not in _CLASSES.values():
            raise CheckpointError(f"{_METADATA} sets attributes of {made!r}, which is not allowed: it is not unpickled")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise CheckpointError(f"{_METADATA} names {module}.{name}, which is not allowed: it is not unpickled")
