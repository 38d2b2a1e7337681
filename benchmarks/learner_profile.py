"""What a GPU does in one step of the learner: how long its kernels run, those of NCCL alone, and none."""

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
    """Milliseconds of one step, which the profiler slows: from its begin until the device is idle, in which any kernel
    runs, in which one of NCCL runs, and in which no other one does. `launches` are calls of the host that start
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
    """Do the `work`, which all ranks do alike. On rank 0 with a GPU the profile, and a trace in `name`.json.gz; None
    elsewhere."""
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
    """Milliseconds in which at least one of the spans, in microseconds, is."""
    total, end = 0.0, -float("inf")
    for left, right in sorted(spans):
        total += max(0.0, right - max(left, end))
        end = max(end, right)
    return total / 1e3
