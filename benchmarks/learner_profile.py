"""Profiles one step of the learner: the GPU's time in kernels, in NCCL's kernels only, and idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from asyncrl.learner.ranks.ranks import Ranks

NCCL = "ncclDevKernel"


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one step, which the profiler slows: `wall` until the device is idle, `busy` with any kernel,
    `nccl` with a kernel of NCCL, and `nccl_alone` with no other kernel. `launches` are the host's calls that start
    kernels and copies."""

    wall: float
    busy: float
    nccl: float
    nccl_alone: float
    launches: int

    def __str__(self) -> str:
        return (
            f"step {self.wall:.1f} ms: a kernel runs {self.busy:.1f}, none {self.wall - self.busy:.1f}; NCCL "
            f"{self.nccl:.1f}, alone {self.nccl_alone:.1f}; {self.launches} launches"
        )


def profiled(work: Callable[[], Any], name: Path, ranks: Ranks) -> Profile | None:
    """Do the `work`, as all ranks do. Returns the profile on rank 0 with a GPU, and writes a trace to `name`.json.gz;
    None on all other ranks."""
    if ranks.device.type != "cuda" or ranks.rank != 0:
        work()
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    name.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(f"{name}.json.gz")
    events = list(recorded.events() or ())
    kernels = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    spans = {
        is_nccl: [
            (each.time_range.start, each.time_range.end) for each in kernels if each.name.startswith(NCCL) == is_nccl
        ]
        for is_nccl in (True, False)
    }
    busy = covered([*spans[True], *spans[False]])
    launches = sum(each.name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpyAsync")) for each in events)
    return Profile(wall * 1e3, busy, covered(spans[True]), busy - covered(spans[False]), launches)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Milliseconds that at least one of the spans (in microseconds) covers."""
    total, end = 0.0, -float("inf")
    for left, right in sorted(spans):
        total += max(0.0, right - max(left, end))
        end = max(end, right)
    return total / 1e3
