"""Measures the use of the machine by a role's process, for the rows of its metrics.

A thread takes the samples, so that a driver that hangs does not block the role, and a row costs only a few sums.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean

import psutil

from asyncrl.machine.gpu_use import GpuUse, VisibleGpus
from asyncrl.machine.process_tree import HostUse, ProcessTree
from asyncrl.observe.metrics import Fanout, Sink, Value

logger = logging.getLogger(__name__)

SAMPLE_S = 1.0
STALE_S = 30.0
"""A sample that is older than this many seconds is not reported. It is the newest sample only if all later attempts
failed or hang."""
CLOSE_S = 1.0

GpuReader = Callable[[], GpuUse | None]
_HostSample = tuple[float, HostUse]


class Usage:
    """Samples the use of processors and memory with `host`, and of GPUs with the reader that `open_gpus` returns.

    The first sample calls `open_gpus`. After an error the GPUs are not read again. `clock` gives seconds. Any thread
    may call `values`.
    """

    def __init__(
        self,
        host: Callable[[], HostUse],
        open_gpus: Callable[[], GpuReader] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._open_gpus = open_gpus
        self._gpus: GpuReader | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: list[_HostSample] = []
        self._fails = False
        self._gpu_uses: list[GpuUse] = []
        self._values: dict[str, float] = {}

    def sample(self) -> None:
        """Read everything once."""
        try:
            host = (self._clock(), self._host())
        except (psutil.Error, OSError) as error:
            if not self._fails:
                logger.warning("the CPU and memory use of this process is not measured for now: %r", error)
            self._fails = True
            return
        self._fails = False
        gpus = self._read_gpus()
        with self._lock:
            # Keeps the sample of the last row, and the newest one.
            self._samples = [*self._samples[:1], host]
            if gpus is not None:
                self._gpu_uses.append(gpus)

    def values(self) -> dict[str, float]:
        """The values of the next row: means since the last row, and the newest use of memory. Without a new sample the
        last values come again, for up to STALE_S."""
        with self._lock:
            if len(self._samples) > 1:
                self._values = {**_host_values(*self._samples), **_gpu_values(self._gpu_uses)}
                self._samples, self._gpu_uses = self._samples[1:], []
            return dict(self._values) if self._values and self._clock() - self._samples[0][0] <= STALE_S else {}

    def _read_gpus(self) -> GpuUse | None:
        try:
            if self._open_gpus is not None:
                self._gpus, self._open_gpus = self._open_gpus(), None
            return None if self._gpus is None else self._gpus()
        except Exception as error:  # noqa: BLE001 - a driver's library may raise anything
            logger.warning("the use of GPUs is not measured any more: %r", error)
            self._open_gpus = self._gpus = None
            return None


def _host_values(before: _HostSample, after: _HostSample) -> dict[str, float]:
    seconds = max(after[0] - before[0], 1e-9)
    # The seconds of a child that has ended are missing until its parent has waited for it.
    used = max(0.0, after[1].cpu_s - before[1].cpu_s)
    return {"usage/cpu_cores": used / seconds, "usage/memory_gb": after[1].resident / 1e9}


def _gpu_values(uses: list[GpuUse]) -> dict[str, float]:
    if not uses:
        return {}
    known = [use.utilisation for use in uses if use.utilisation is not None]
    share = {"usage/gpu_utilisation": fmean(known)} if known else {}
    return {"usage/gpu_memory_gb": uses[-1].taken / 1e9, **share}


class WithUsage(Fanout):
    """Adds the values of `usage` to each row for `sink`."""

    def __init__(self, sink: Sink, usage: Usage) -> None:
        super().__init__([sink])
        self._usage = usage

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        super().log(step, {**values, **self._usage.values()})


@contextmanager
def usage_of_this_process(gpus: bool = True) -> Iterator[Usage]:
    """Sample the use of the machine by this process and its children, and of the GPUs that it sees, every SAMPLE_S.
    `gpus` is true if the role may use GPUs."""
    usage, stop = Usage(ProcessTree().read, _open_gpus if gpus else None), threading.Event()

    def sample() -> None:
        usage.sample()
        while not stop.wait(SAMPLE_S):
            usage.sample()

    thread = threading.Thread(target=sample, name="usage", daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        stop.set()
        thread.join(CLOSE_S)


def _open_gpus() -> GpuReader:
    import pynvml

    try:
        return VisibleGpus(pynvml).read
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return lambda: None
