"""Reads from the driver (NVML) how much all processes use the GPUs that this process sees. This needs no CUDA context,
which would take memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from asyncrl.machine.numa import BY_ADDRESS, GPU_VARIABLE, ORDER_VARIABLE, visible_gpus

logger = logging.getLogger(__name__)


class GpuUse(NamedTuple):
    """The use of GPUs by all processes.

    - `taken`: the bytes that are taken on all GPUs together
    - `utilisation`: the share of recent time in which kernels ran, as a mean over the GPUs. None: the driver does not
      report it, as for a part of a GPU (MIG)
    """

    taken: int
    utilisation: float | None


class VisibleGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES in `environment` names, or all GPUs of this machine. `nvml` is the module
    pynvml, and `handles` are its handles of the GPUs.

    Raises pynvml.NVMLError: the driver does not answer, or does not know a named GPU.
    """

    def __init__(self, nvml: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self.handles = self._named(environment)

    def read(self) -> GpuUse | None:
        """Return the use now, or None if there are no GPUs. Raises pynvml.NVMLError: the driver does not answer."""
        if not self.handles:
            return None
        taken = sum(int(self._nvml.nvmlDeviceGetMemoryInfo(each).used) for each in self.handles)
        shares = [self._utilisation(each) for each in self.handles]
        known = [share for share in shares if share is not None]
        return GpuUse(taken, sum(known) / len(known) if known else None)

    def smallest(self) -> int | None:
        """Return the bytes of memory of the smallest GPU, or None if there are no GPUs. Raises pynvml.NVMLError: the
        driver does not answer."""
        return min((int(self._nvml.nvmlDeviceGetMemoryInfo(each).total) for each in self.handles), default=None)

    def _utilisation(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._nvml.NVMLError_NotSupported:
            return None

    def _named(self, environment: Mapping[str, str]) -> list[Any]:
        nvml = self._nvml
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if GPU_VARIABLE not in environment:
            return every
        names = visible_gpus(environment[GPU_VARIABLE])
        by_address = environment.get(ORDER_VARIABLE) == BY_ADDRESS
        if any(map(str.isdecimal, names)) and not by_address and len({*map(nvml.nvmlDeviceGetName, every)}) > 1:
            # CUDA numbers GPUs of different models by their speed, which NVML does not report.
            return []
        # CUDA, too, sees no GPU from the first wrong number on.
        known = takewhile(lambda name: not name.isdecimal() or int(name) < len(every), names)
        return [every[int(name)] if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name) for name in known]


def gpu_bytes(nvml: Any) -> int | None:
    """Return the bytes of memory of the smallest GPU that this process sees. `nvml` is the module pynvml. None:
    there is no GPU, or the driver does not say it, as for a part of a GPU (MIG)."""
    try:
        return VisibleGpus(nvml).smallest()
    except nvml.NVMLError as error:
        logger.info("the memory of the GPUs is unknown: %s", error)
        return None
