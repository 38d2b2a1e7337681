"""Records chosen learner steps: writes traces, which Perfetto (https://ui.perfetto.dev) shows, and snapshots of a GPU's
memory (https://docs.pytorch.org/memory_viz)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

ENTRIES = 1_000_000
"""The maximum number of allocations and releases in the snapshot of a step. A snapshot keeps the latest ones."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The settings of profiles.

    - `traced`: the steps that get a trace.
    - `snapshots`: the steps that get a snapshot of GPU memory.
    - `folder`: the folder in which traces and snapshots are written.
    """

    traced: Collection[int]
    snapshots: Collection[int]
    folder: Path


def profiled(steps: Iterable[int], settings: ProfileSettings, rank: int) -> Iterator[int]:
    """Yield the `steps`, and record the work of the chosen steps.

    - The trace of a step is step-NNNNNN-rank-R.json.gz. It has the step's operators, kernels and allocated memory.
    - The snapshot of a step is step-NNNNNN-rank-R-memory.pickle. It has the use of the GPU's memory. Without a GPU
      there is a warning instead.
    - A step that fails leaves no record.
    """
    has_gpu = torch.cuda.is_available()
    if settings.snapshots and not has_gpu:
        logger.warning("observe.memory_steps is ignored: it records the memory of GPUs, and this machine has none")
    for step in steps:
        name = f"step-{step:06d}-rank-{rank}"
        with ExitStack() as records:
            if step in settings.traced:
                records.enter_context(_traced(settings.folder / f"{name}.json.gz"))
            if step in settings.snapshots and has_gpu:
                records.enter_context(_memory_recorded(settings.folder / f"{name}-memory.pickle"))
            yield step


@contextmanager
def _traced(path: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as recorded:
        yield
    _write(path, recorded.export_chrome_trace, "a trace of the step")


@contextmanager
def _memory_recorded(path: Path) -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
        _write(path, torch.cuda.memory._dump_snapshot, "a snapshot of the step's memory")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(path: Path, write: Callable[[str], object], content: str) -> None:
    partial = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(partial))
        partial.rename(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
    else:
        logger.info("%s has %s", path, content)
