"""Merges the model shards of verl's FSDP workers: one file `model_world_size_N_rank_K.pt` per rank.

A file is a pickled state dict of DTensors or plain tensors. A DTensor contains its device mesh and placements. A rank's
plain tensor is a copy of the whole tensor, some of its rows, or a part of its flattened elements; the shape that the
model expects shows which. Files are mapped into memory, and read by `torch.load` with `weights_only`, which runs no
code from them.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from xxhash import xxh3_64_intdigest

from asyncrl.errors import CheckpointError

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MESH_LOGGER = logging.getLogger("torch.distributed.device_mesh")


def shard_files(folder: Path) -> list[Path]:
    """The files of all ranks, in order; an empty list if `folder` has no shards.

    Raises CheckpointError: a rank is missing or duplicated, or the files are of different world sizes.
    """
    found = {path: match for path in folder.glob("model_world_size_*.pt") if (match := _FILE.fullmatch(path.name))}
    sizes = sorted({int(match[1]) for match in found.values()})
    if len(sizes) > 1:
        raise CheckpointError(f"{folder} has shards for different numbers of ranks, {sizes}: keep only one set")
    if not sizes:
        return []
    by_rank = {int(match[2]): path for path, match in found.items()}
    missing = [rank for rank in range(sizes[0]) if rank not in by_rank]
    if missing:
        raise CheckpointError(
            f"{folder} lacks the shards of ranks {missing} of {sizes[0]}: each host wrote only its own ranks; copy all "
            "files into one folder"
        )
    if len(found) != sizes[0]:
        names = ", ".join(sorted(path.name for path in found))
        raise CheckpointError(f"{folder} has the shards of {len(found)} ranks instead of {sizes[0]}: {names}")
    return [by_rank[rank] for rank in range(sizes[0])]


class FsdpShards:
    """The state dict of a model, with one file per rank. Raises CheckpointError: a file cannot be read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._states = [_read(file) for file in files]
        differing = {name for state in self._states for name in state.keys() ^ self._states[0].keys()}
        if differing:
            raise CheckpointError(f"not every shard has the tensor {min(differing)}")

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._states[0])

    @torch.no_grad()
    def merge(self, expected: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """All tensors, merged. `expected` has the shapes of the model's tensors by name.

        Raises CheckpointError: the shards of a tensor do not fit together, or two ranks have the same shards.
        """
        tensors = {name: self._merge(name, expected.get(name)) for name in self._states[0]}
        split = [name for name, whole in tensors.items() if _local(self._states[0][name]).shape != whole.shape]
        # The parts of a single tensor may be equal, as in a bias of zeros. So it is an error only if the parts of every
        # sharded tensor are equal.
        if split and not any(map(self._has_other_parts, split)):
            raise CheckpointError(
                "two ranks have the same part of every sharded tensor: the file of one rank was probably copied over "
                "the other's"
            )
        return tensors

    def _has_other_parts(self, name: str) -> bool:
        """True if the ranks have different parts of a sharded tensor. Ranks on which the placements replicate the same
        part are expected to have equal parts."""
        shards = [state[name] for state in self._states]
        parts = [_local(each).reshape(-1).view(torch.uint8).numpy() for each in shards if _local(each).numel()]
        return len({xxh3_64_intdigest(each.data) for each in parts}) * _count_of_copies(shards[0]) >= len(parts)

    def _merge(self, name: str, expected: Sequence[int] | None) -> Tensor:
        shards = [state[name] for state in self._states]
        if len(kinds := sorted({str(each.dtype) for each in shards})) > 1:
            raise CheckpointError(f"{name} is of {' and '.join(kinds)} on different ranks")
        if distributed := [each for each in shards if isinstance(each, DTensor)]:
            if len(distributed) < len(shards):
                raise CheckpointError(f"{name} is a DTensor on some ranks only")
            return _from_mesh(name, distributed)
        return _from_plain(name, shards, shards[0].shape if expected is None else torch.Size(expected))


def _read(file: Path) -> Mapping[str, Tensor]:
    try:
        with _quiet_about_process_groups():
            state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} has other objects than tensors and DTensors, such as ShardedTensors of FSDP without a device "
            f"mesh; these are not unpickled: {error}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in state.items()
    ):
        raise CheckpointError(f"{file} is not a state dict of tensors")
    return state


@contextmanager
def _quiet_about_process_groups() -> Iterator[None]:
    """Silence torch's warning about each unpickled mesh. It says that the writer's process groups do not exist here."""
    level = _MESH_LOGGER.level
    _MESH_LOGGER.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _MESH_LOGGER.setLevel(level)


def _from_mesh(name: str, shards: Sequence[DTensor]) -> Tensor:
    """A whole tensor from the DTensors of all ranks."""
    first = shards[0]
    for placement in first.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(f"{name} has the placement {placement}: only Shard and Replicate are merged")
    sharded = [each.dim for each in first.placements if isinstance(each, Shard)]
    if len(sharded) != len(set(sharded)):
        raise CheckpointError(
            f"{name} has the placements {first.placements}: two mesh dimensions shard the same dimension of the "
            "tensor (FSDP with tensor parallelism), which is not supported"
        )
    if any(each.placements != first.placements or each.shape != first.shape for each in shards):
        raise CheckpointError(f"{name} has different placements on different ranks")
    ranks = first.device_mesh.mesh
    if sorted(ranks.flatten().tolist()) != list(range(len(shards))):
        raise CheckpointError(f"the mesh of {name} has the ranks {ranks.tolist()}, but there are {len(shards)} files")
    whole = _along_mesh(name, ranks, first.placements, [each.to_local() for each in shards])
    if whole.shape != first.shape:
        raise CheckpointError(f"the merged {name} has the shape {list(whole.shape)} instead of {list(first.shape)}")
    return whole


def _along_mesh(name: str, ranks: Tensor, placements: Sequence[Any], local: Sequence[Tensor]) -> Tensor:
    """The merged tensor of `ranks`, a part of the mesh. `placements` has the placement of each dimension of `ranks`."""
    if not placements:
        return local[int(ranks)]
    parts = [_along_mesh(name, each, placements[1:], local) for each in ranks]
    if isinstance(placements[0], Shard):
        return torch.cat(parts, placements[0].dim)
    return _copies(name, parts)


def _local(shard: Tensor) -> Tensor:
    return shard.to_local() if isinstance(shard, DTensor) else shard


def _count_of_copies(shard: Tensor) -> int:
    if not isinstance(shard, DTensor):
        return 1
    mesh = shard.device_mesh.mesh.shape
    return math.prod(size for size, each in zip(mesh, shard.placements, strict=True) if isinstance(each, Replicate))


def _copies(name: str, parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if not all(torch.equal(part, first) or torch.allclose(part, first, 0, 0, equal_nan=True) for part in parts[1:]):
        raise CheckpointError(f"the copies of {name} on the ranks have different values")
    return first


def _from_plain(name: str, shards: Sequence[Tensor], expected: torch.Size) -> Tensor:
    """A whole tensor from the plain tensors of all ranks."""
    if all(each.shape == expected for each in shards):
        return _copies(name, shards)
    # A rank may have no element of a tensor.
    rows = [each for each in shards if each.numel()]
    if all(each.shape[1:] == expected[1:] for each in rows) and sum(map(len, rows)) == expected[0]:
        return torch.cat(rows)
    if all(each.dim() == 1 for each in rows) and sum(map(len, rows)) == math.prod(expected):
        return torch.cat(rows).view(expected)
    shapes = [list(each.shape) for each in shards]
    raise CheckpointError(f"{name} has the shapes {shapes} on the ranks, which do not make {list(expected)}")
