"""Writes weights and optimiser state to disk, and reads them. The number of ranks may change between writing and
reading.

If the ranks hold several copies of the models (`learner.replicas`), only the ranks of the first copy write. Each writes
its shards into its own safetensors file, without communication. The rows of a sharded tensor are concatenated from all
files in the order of the ranks. A tensor that is not sharded is in the file of rank 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import CheckpointError
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.ranks.ranks import Ranks, shard_of
from asyncrl.machine.activity import Activity
from asyncrl.machine.files import save_tensors
from asyncrl.machine.host_memory import pinned
from asyncrl.machine.long_work import tracked
from asyncrl.modelling.adapters import adapted_layers
from asyncrl.weights.threads import begin

logger = logging.getLogger(__name__)

Models = Mapping[str, Trainable[Any]]


class HostCopy:
    """Copies the tensors that this rank will write into its file. The copy goes from `device` to host memory. Each copy
    overwrites the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: Mapping[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._reserving: Future[None] | None = None
        self._changed: torch.cuda.Event | None = None

    def find(self, models: Models, ranks: Ranks) -> None:
        """Find the tensors of `models` that belong in this rank's file. Only ranks of the first copy of the models call
        this. Call it again once optimisers have more moments. Never call it within a pass, since FSDP replaces some
        tensors during a pass."""
        self._parts = _own_parts(models, ranks)

    def changed(self) -> None:
        """Record that all kernels that change the tensors have been launched. The next copy begins after these
        kernels."""
        # `take` copies on its own stream. Without the event it could copy tensors before the optimiser wrote them.
        if self._device.type == "cuda":
            self._changed = torch.cuda.current_stream(self._device).record_event()

    def reserve(self) -> None:
        """Begin to allocate the memory for a copy of the found tensors, unless this memory exists or is already being
        allocated. The allocation takes longer than the copy itself."""
        if self._reserving is None or (self._reserving.done() and self._buffers.keys() != self._parts.keys()):
            self._reserving = begin(self._reserve, "checkpoint", daemon=True)

    @torch.no_grad()
    def take(self) -> tuple[Mapping[str, Tensor], torch.cuda.Event | None]:
        """Begin a copy of the found tensors, as they were at the last call of `changed`. The copy does not wait for a
        running pass. On a GPU, the copy is whole once the returned event has happened, and the tensors must not change
        before that event."""
        if self._reserving is not None:
            self._reserving.result()
        self._reserve()
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if stream is not None and self._changed is not None:
            stream.wait_event(self._changed)
        with torch.cuda.stream(stream):
            for name, each in self._parts.items():
                self._buffers[name].copy_(each, non_blocking=True)
        return self._buffers, None if stream is None else stream.record_event()

    def _reserve(self) -> None:
        started, before, parts = time.monotonic(), self._buffers, self._parts
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._buffers = {name: self._buffer(name, each) for name, each in parts.items()}
        new = {name: each for name, each in self._buffers.items() if each is not before.get(name)}
        if new:
            size, taken = sum(each.nbytes for each in new.values()) / 1e9, time.monotonic() - started
            logger.info("allocated %.1f GB of host memory for checkpoints in %.1f s", size, taken)
        # Only memory for tensors on a GPU is pinned.
        slow = sum(each.nbytes for name, each in new.items() if parts[name].is_cuda and not each.is_pinned())
        if slow:
            logger.warning(
                "the GPU's driver could not pin %.1f GB of the memory for checkpoints, so each checkpoint holds up "
                "training for longer: more free memory on the host, or a higher 'ulimit -l', helps",
                slow / 1e9,
            )

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            # Both calls write zeros, since the system allocates memory only when it is written.
            return pinned(tensor) if tensor.is_cuda else torch.zeros_like(tensor)
        return buffer


def _own_parts(models: Models, ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of `models` that belong in this rank's file, by their names in the file."""
    local = {name: _local(tensor) for name, tensor in _tensors(models) if ranks.rank == 0 or _is_sharded(tensor)}
    own = {name: rows for name, rows in local.items() if ranks.rank == 0 or rows.numel()}
    return {part: each for name, rows in own.items() for part, each in _parts(name, rows)}


def write_state(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> Path:
    """Write the file of `rank` into `folder`. Returns its path. The file is not synced to the disk yet. Raises
    OSError."""
    path = folder / _file(rank)
    save_tensors(tensors, path)
    return path


@torch.no_grad()
def read_state(models: Models, folder: Path, count: int, ranks: Ranks) -> None:
    """Load the `count` files of shards in `folder` into `models`. Raises CheckpointError: the files are damaged or
    incomplete."""
    with _opened(folder, count, ranks, "; if an older checkpoint exists, remove this one to resume from it") as stored:
        for name, model in models.items():
            _load_moments(name, model, stored, ranks.activity)
            stored.load_weights(name, model.module, ranks.activity)


@torch.no_grad()
def read_weights(name: str, module: nn.Module, folder: Path, count: int) -> None:
    """Load only the weights of the model `name`, from `count` files, into a module that is not sharded. Raises
    CheckpointError: the files are damaged, incomplete, or of another model."""
    with _opened(folder, count, Ranks.alone()) as stored:
        stored.load_weights(name, module)
        unknown = stored.weights(name) - {weight for weight, _ in _weights(module)}
        # If a critic shares the policy's backbone, the checkpoint has the critic's head among the policy's weights. A
        # policy that is loaded alone does not need this head.
        unknown = {weight for weight in unknown if not weight.startswith("weights/value_head.")}
        if unknown:
            raise CheckpointError(f"it is a checkpoint of another model, which also has {min(unknown)}")


@contextmanager
def _opened(folder: Path, count: int, ranks: Ranks, advice: str = "") -> Iterator[_StoredTensors]:
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / _file(rank), "pt")) for rank in range(count)]
            yield _StoredTensors(files, ranks)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}{advice}") from error


class _StoredTensors:
    """The tensors in the files of all ranks that wrote a checkpoint. `ranks` are the ranks that read them now."""

    def __init__(self, files: list[Any], ranks: Ranks) -> None:
        self._files = [(file, set(file.keys())) for file in files]
        self._ranks = ranks

    def weights(self, model: str) -> set[str]:
        """Return the names of a model's weights. The file of rank 0 has a part of each."""
        prefix = f"{model}/"
        return {name.removeprefix(prefix) for name in self._files[0][1] if name.startswith(f"{prefix}weights/")}

    def moved(self, model: str) -> set[str]:
        """Return the names of the model's parameters that have moments."""
        prefix = f"{model}/moments/"
        return {name.split("/")[3] for name in self._files[0][1] if name.startswith(prefix)}

    def load_weights(self, name: str, module: nn.Module, activity: Activity | None = None) -> None:
        """Load the weights of the model `name` into `module`; `activity` shows the progress. Raises CheckpointError: a
        weight is missing or misshapen."""
        weights = list(_weights(module))
        for weight, tensor in tracked(weights, f"reading the {name}'s weights", len(weights), "tensors", activity):
            self.load(f"{name}/{weight}", tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy the stored tensor into this rank's shard of `tensor`. Raises CheckpointError: the shapes differ."""
        local = _local(tensor)
        if tensor.dim() == 0:
            local.copy_(self._files[0][0].get_tensor(name))
        elif _is_quantized(local) and self._has_own_parts(name):
            for part, each in _parts(name, local):
                each.copy_(self._files[self._ranks.shard][0].get_tensor(part))
        elif local.numel():
            sharded, count = _is_sharded(tensor), len(tensor)
            rows = self._rows(name, shard_of(count, self._ranks.shard, self._ranks.shards) if sharded else range(count))
            if rows.shape != local.shape:
                raise CheckpointError(f"{name} has the shape {list(rows.shape)}; {list(local.shape)} is needed")
            local.copy_(rows)

    def _has_own_parts(self, name: str) -> bool:
        """True if the number of ranks has not changed, so that one file has exactly this rank's shard of a quantized
        tensor."""
        return len(self._files) == self._ranks.shards and f"{name}/codes" in self._files[self._ranks.shard][1]

    def _rows(self, name: str, rows: range) -> Tensor:
        parts, first = [], 0
        for file, names in self._files:
            if name in names:
                part = file.get_slice(name)
                count = part.get_shape()[0]
            elif f"{name}/codes" in names:
                part = _dequantized(*(file.get_tensor(f"{name}/{part}") for part in ("codes", "scale", "qmap")))
                count = len(part)
            else:
                continue
            start, stop = max(rows.start - first, 0), min(rows.stop - first, count)
            if start < stop:
                parts.append(part[start:stop])
            first += count
        if not parts:
            raise CheckpointError(f"{name} is missing")
        return torch.cat(parts)


def _tensors(models: Models) -> Iterator[tuple[str, Tensor]]:
    for name, model in models.items():
        for weight, tensor in _weights(model.module):
            yield f"{name}/{weight}", tensor
        for parameter, moments in model.moments().items():
            for key, tensor in moments.items():
                yield f"{name}/moments/{key}/{parameter}", tensor


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters (tied parameters only once) and the buffers that belong to a module's state. A module with
    adapters yields only trained parameters: the frozen ones are in the files that it was loaded from."""
    every = dict(module.named_parameters(remove_duplicate=False))
    once = dict(module.named_parameters())
    if adapted_layers(module):
        once = {name: each for name, each in once.items() if each.requires_grad}
    for name, tensor in module.state_dict().items():
        if name in once or name not in every:
            yield f"weights/{name}", tensor


def _load_moments(name: str, model: Trainable[Any], stored: _StoredTensors, activity: Activity) -> None:
    model.begin_moments(stored.moved(name))
    found = model.moments()
    what = f"reading the {name}'s moments"
    for parameter, moments in tracked(found.items(), what, len(found), "parameters", activity):
        for key, tensor in moments.items():
            stored.load(f"{name}/moments/{key}/{parameter}", tensor)


def _parts(name: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor with its name, or the parts of a quantized tensor with their names."""
    if not _is_quantized(local):
        yield name, local
        return
    for part in local.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield f"{name}/{part}", getattr(local, part)


def _is_quantized(local: Tensor) -> bool:
    return hasattr(local, "codes")


def _dequantized(codes: Tensor, scale: Tensor, qmap: Tensor) -> Tensor:
    """Compute the numbers of an 8-bit tensor, in which each block of codes has a scale."""
    return (qmap[codes.int()].view(len(scale), -1) * scale[:, None]).view(codes.shape)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _is_sharded(tensor: Tensor) -> bool:
    # If there are several copies of the model, the first placement replicates over them.
    assert not isinstance(tensor, DTensor) or tensor.placements[-1] == Shard(0), tensor
    return isinstance(tensor, DTensor)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor. The shard shares the tensor's memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
