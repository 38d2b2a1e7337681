"""Weights and optimiser state on disk: what one number of ranks wrote, any other number may read.

Every rank writes what it holds into a safetensors file of its own, and ranks tell each other nothing. The rows of a
sharded tensor are those of all files in the order of ranks; what is not sharded is in the first rank's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import CheckpointError
from asyncrl.learner.ranks import Ranks, shard_of
from asyncrl.learner.trainer import Trainable
from asyncrl.machine.files import save_tensors

Models = Mapping[str, Trainable[Any]]


def write_state(models: Models, folder: Path, ranks: Ranks) -> Path:
    """Write this rank's file of `models` into `folder`; the file, which need not be on the disk yet. Raises OSError."""
    held = {name: _held(tensor) for name, tensor in _tensors(models) if ranks.rank == 0 or _sharded(tensor)}
    path = folder / _file(ranks.rank)
    save_tensors({name: local.contiguous() for name, local in held.items() if ranks.rank == 0 or local.numel()}, path)
    return path


@torch.no_grad()
def read_state(models: Models, folder: Path, count: int, ranks: Ranks) -> None:
    """Put what `count` ranks wrote into `folder` into `models`. Raises CheckpointError: it is damaged or incomplete."""
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / _file(rank), "pt")) for rank in range(count)]
            stored = _Stored(files, ranks)
            for name, model in models.items():
                for weight, tensor in _weights(model.module):
                    stored.fill(f"{name}/{weight}", tensor)
                _read_moments(f"{name}/", model, stored)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error}; remove that folder to resume from an older checkpoint"
        ) from error


class _Stored:
    """The tensors in the files of all ranks that wrote, read by `ranks`."""

    def __init__(self, files: list[Any], ranks: Ranks) -> None:
        self._files = [(file, set(file.keys())) for file in files]
        self._ranks = ranks

    def __contains__(self, name: str) -> bool:
        return name in self._files[0][1]

    def fill(self, name: str, tensor: Tensor) -> Tensor:
        """Copy what was stored into what this rank holds of `tensor`. Raises CheckpointError: that does not fit."""
        local = _held(tensor)
        if tensor.dim() == 0:
            local.copy_(self._files[0][0].get_tensor(name))
        elif local.numel():
            rows = range(len(tensor))
            found = self._rows(
                name, shard_of(len(tensor), self._ranks.rank, self._ranks.size) if _sharded(tensor) else rows
            )
            if found.shape != local.shape:
                raise CheckpointError(f"of {name} {list(found.shape)} was found where {list(local.shape)} is needed")
            local.copy_(found)
        return tensor

    def _rows(self, name: str, rows: range) -> Tensor:
        pieces, first = [], 0
        for file in (file for file, names in self._files if name in names):
            piece = file.get_slice(name)
            count = piece.get_shape()[0]
            start, stop = max(rows.start - first, 0), min(rows.stop - first, count)
            if start < stop:
                pieces.append(piece[start:stop])
            first += count
        if not pieces:
            raise CheckpointError(f"{name} is missing")
        return torch.cat(pieces)


def _tensors(models: Models) -> Iterator[tuple[str, Tensor]]:
    for name, model in models.items():
        for weight, tensor in _weights(model.module):
            yield f"{name}/{weight}", tensor
        for parameter, state in _moments(model).items():
            for key, tensor in state.items():
                yield f"{name}/{_moment(key, parameter)}", tensor


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that belong to a module's state."""
    every = dict(module.named_parameters(remove_duplicate=False))
    once = dict(module.named_parameters())
    for name, tensor in module.state_dict().items():
        if name in once or name not in every:
            yield f"weights/{name}", tensor


def _moments(model: Trainable[Any]) -> dict[str, dict[str, Tensor]]:
    """What the optimiser keeps of each parameter that it has moved, by the parameter's name."""
    states = model.optimizer.state
    return {name: states[each] for name, each in model.module.named_parameters() if each in states}


def _read_moments(prefix: str, model: Trainable[Any], stored: _Stored) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(model.module.named_parameters()):
        own = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        if prefix + _moment("step", name) in stored:
            states[index] = {key: stored.fill(prefix + _moment(key, name), each) for key, each in own.items()}
    model.optimizer.load_state_dict({**model.optimizer.state_dict(), "state": states})


def _moment(key: str, parameter: str) -> str:
    return f"moments/{key}/{parameter}"


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _sharded(tensor: Tensor) -> bool:
    assert not isinstance(tensor, DTensor) or tensor.placements == (Shard(0),), tensor
    return isinstance(tensor, DTensor)


def _held(tensor: Tensor) -> Tensor:
    """What this rank has of it, sharing its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
