"""Traces of chosen learner steps, which Perfetto (https://ui.perfetto.dev) shows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


def profiled(steps: Iterable[int], chosen: Collection[int], folder: Path, rank: int) -> Iterator[int]:
    """The `steps`. What happens after a `chosen` one until the next is asked for is recorded: operators, kernels and
    allocated memory, in `folder`/step-NNNNNN-rank-R.json.gz. A step that fails has no trace."""
    for step in steps:
        with _traced(folder / f"step-{step:06d}-rank-{rank}.json.gz") if step in chosen else nullcontext():
            yield step


@contextmanager
def _traced(path: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as recorded:
        yield
    partial = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(partial))
        partial.rename(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
    else:
        logger.info("%s has a trace of the step", path)
