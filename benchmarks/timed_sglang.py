"""An SGLang server that writes when each step of an update began and ended: see push_stops. It runs in SGLang's Python.

The file that TIMES names gets a line for each step: its name, and the seconds of Linux's monotonic clock at which it
began and ended. All processes of a machine share this clock.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from pathlib import Path
from typing import Any

TIMES = "ASYNCRL_STEP_TIMES"
MANAGERS = "sglang.srt.managers"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
STEPS = {
    "frontend abort": (f"{MANAGERS}.tokenizer_manager", "TokenizerManager", "abort_request"),
    "frontend answers": (f"{MANAGERS}.tokenizer_manager", "TokenizerManager", "_handle_batch_output"),
    "frontend waits": ("sglang.srt.utils.aio_rwlock", "RWLock", "acquire_writer"),
    "frontend update": (f"{MANAGERS}.tokenizer_manager", "TokenizerManager", "update_weights_from_tensor"),
    "scheduler abort": (f"{MANAGERS}.scheduler", "Scheduler", "abort_request"),
    "scheduler pause": (f"{MANAGERS}.scheduler", "Scheduler", "pause_generation"),
    "scheduler idle": (f"{MANAGERS}.scheduler", "Scheduler", "on_idle"),
    "scheduler update": (
        f"{MANAGERS}.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        "update_weights_from_tensor",
    ),
    "scheduler opens": (f"{MANAGERS}.tp_worker", "BaseTpWorker", "_deserialize_own_rank"),
    "scheduler loads": (UPDATER, "WeightUpdater", "update_weights_from_tensor"),
}
"""The timed methods: a module, a class and its method."""


def time_steps(path: Path) -> None:
    """Write the times of all steps to the end of the file. Releases of SGLang without a step do not write it."""
    lines = path.open("a", buffering=1)

    def write(step: str, begun: float) -> None:
        lines.write(f"{step}\t{begun:.6f}\t{time.monotonic():.6f}\n")

    for step, (module, name, method) in STEPS.items():
        owner = getattr(importlib.import_module(module), name, None)
        if hasattr(owner, method):
            setattr(owner, method, _timed(getattr(owner, method), functools.partial(write, step)))
        else:
            print(f"{module} has no {name}.{method}", flush=True)


def _timed(method: Any, write: Any) -> Any:
    @functools.wraps(method)
    def plain(*args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        try:
            return method(*args, **options)
        finally:
            write(begun)

    @functools.wraps(method)
    async def awaited(*args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        try:
            return await method(*args, **options)
        finally:
            write(begun)

    return awaited if inspect.iscoroutinefunction(method) else plain


# SGLang's other processes import this file, too.
if TIMES in os.environ:
    time_steps(Path(os.environ[TIMES]))

if __name__ == "__main__":
    arguments = importlib.import_module("sglang.srt.server_args").prepare_server_args(sys.argv[1:])
    importlib.import_module("sglang.srt.entrypoints.http_server").launch_server(arguments)
