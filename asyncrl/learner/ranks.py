"""The learner's ranks: one process each, under torchrun or alone, on GPUs with NCCL or on the CPU with gloo."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.errors import StoppedError

PATIENCE = timedelta(days=1)
"""How long a rank waits for the others. A lost rank is noticed by whoever started it; a slow replay is no fault."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among `size`, and what they do together. Every method is called by all ranks alike."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks, on the device of `values`, which stay as they are. What lies on the CPU stays
        there, so that a GPU is not waited for."""
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def merge(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each named tensor, on the CPU. A rank may lack names that others have."""
        own = {name: tensor.detach().cpu() for name, tensor in sums.items()}
        gathered: list[dict[str, Tensor]] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, own)
        names = dict.fromkeys(name for each in gathered for name in each)
        return {name: torch.stack([each[name] for each in gathered if name in each]).sum(0) for name in names}

    def leave_if(self, stopped: bool) -> None:
        """Raises StoppedError on every rank where `stopped` is true on any, so that none waits for one that left."""
        if self.sum(torch.tensor(int(stopped))).item():
            raise StoppedError("the learner was asked to stop")

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.sum(torch.zeros(()))


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun's environment names, else this process alone; they part at the end."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    try:
        kind = "cuda" if cuda else "cpu"
        size = dist.get_world_size()
        device = torch.device(kind, torch.cuda.current_device()) if cuda else torch.device(kind)
        yield Ranks(dist.get_rank(), size, device, init_device_mesh(kind, (size,)))
    finally:
        # What still refers to a gloo group keeps its threads, and those abort a process that exits.
        gc.collect()
        dist.destroy_process_group()
