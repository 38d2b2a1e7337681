from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from asyncrl.machine.gpu_use import GpuUse, VisibleGpus, gpu_bytes


class DriverError(Exception):
    pass


class NotSupported(DriverError):  # noqa: N818 - as NVML's name for it
    pass


@dataclass
class Driver:
    """A stand-in for pynvml with the GPUs `models`. GPU i has i + 1 bytes taken, and is used by 10 (i + 1) %."""

    NVMLError = DriverError
    NVMLError_NotSupported = NotSupported
    models: list[str] = field(default_factory=lambda: ["H200"] * 4)
    tells_utilisation: bool = True
    answers: bool = True

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.answers:
            raise DriverError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.models)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.models[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=handle + 1, total=10 - handle)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if not self.tells_utilisation:
            raise NotSupported
        return SimpleNamespace(gpu=10 * (handle + 1), memory=0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, GpuUse(10, 0.25)),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, GpuUse(6, 0.3)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, GpuUse(3, 0.3)),
        ({"CUDA_VISIBLE_DEVICES": "1,9,3"}, GpuUse(2, 0.2)),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_the_visible_gpus_are_read(environment: dict[str, str], expected: GpuUse | None) -> None:
    use = VisibleGpus(Driver(), environment).read()
    assert use == (expected and GpuUse(expected.taken, pytest.approx(expected.utilisation)))


def test_numbers_of_unlike_gpus_are_not_guessed() -> None:
    mixed = Driver(["A100", "H200"])
    assert VisibleGpus(mixed, {"CUDA_VISIBLE_DEVICES": "0"}).read() is None
    by_address = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert VisibleGpus(mixed, by_address).read() == GpuUse(1, 0.1)
    assert VisibleGpus(mixed, {"CUDA_VISIBLE_DEVICES": "GPU-1"}).read() == GpuUse(2, 0.2)


def test_a_driver_that_does_not_tell_the_utilisation_still_tells_the_memory() -> None:
    assert VisibleGpus(Driver(tells_utilisation=False), {}).read() == GpuUse(10, None)


def test_the_memory_of_the_smallest_gpu_is_unknown_without_a_gpu_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_bytes(Driver()) == 7
    assert gpu_bytes(Driver(models=[])) is None
    assert gpu_bytes(Driver(answers=False)) is None
