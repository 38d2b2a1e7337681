from __future__ import annotations

from collections.abc import Mapping

import psutil
import pytest

from asyncrl.machine.gpu_use import GpuUse
from asyncrl.machine.process_tree import HostUse
from asyncrl.observe.metrics import Sink, Value
from asyncrl.observe.registry import describe
from asyncrl.observe.usage import STALE_S, Usage, WithUsage, usage_of_this_process
from tests.helpers import until


class Machine:
    """A machine with its clock, the use of a process, and that of its GPUs. An error in place of a use is raised."""

    def __init__(self) -> None:
        self.now = 100.0
        self.host: HostUse | Exception = HostUse(7.0, 10**9)
        self.gpus: GpuUse | Exception | None = None

    def usage(self) -> Usage:
        """Has one sample, from which its first row counts."""
        usage = Usage(self.read_host, lambda: self.read_gpus, lambda: self.now)
        usage.sample()
        assert usage.values() == {}
        return usage

    def read_host(self) -> HostUse:
        if isinstance(self.host, Exception):
            raise self.host
        return self.host

    def read_gpus(self) -> GpuUse | None:
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return self.gpus

    def go_on(self, seconds: float, cpu_s: float) -> None:
        assert isinstance(self.host, HostUse)
        self.now += seconds
        self.host = HostUse(self.host.cpu_s + cpu_s, self.host.resident)


def test_a_row_has_means_since_the_last_one_and_the_newest_memory() -> None:
    machine = Machine()
    usage = machine.usage()
    for cpu_s, gpus in [(0.0, GpuUse(4 * 10**9, 0.2)), (3.0, GpuUse(6 * 10**9, 0.6))]:
        machine.go_on(1.0, cpu_s)
        machine.gpus = gpus
        usage.sample()
    values = usage.values()
    assert values == pytest.approx(
        {"usage/cpu_cores": 1.5, "usage/memory_gb": 1.0, "usage/gpu_memory_gb": 6.0, "usage/gpu_utilisation": 0.4}
    )
    machine.go_on(4.0, 1.0)
    assert usage.values() == values, "there is no newer sample"
    usage.sample()
    assert usage.values()["usage/cpu_cores"] == 0.25
    assert all(describe("learner", name) for name in values)


def test_a_process_without_gpus_has_no_columns_of_them() -> None:
    machine = Machine()
    usage = machine.usage()
    machine.go_on(1.0, 1.0)
    usage.sample()
    assert usage.values().keys() == {"usage/cpu_cores", "usage/memory_gb"}


def test_a_driver_that_fails_ends_its_own_columns_only(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    usage = machine.usage()
    machine.gpus = RuntimeError("GPU is lost")
    for _ in range(3):
        machine.go_on(1.0, 1.0)
        usage.sample()
    assert usage.values() == {"usage/cpu_cores": 1.0, "usage/memory_gb": 1.0}
    assert caplog.text.count("GPU is lost") == 1


def test_samples_that_fail_or_hang_leave_rows_without_the_columns(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    usage = machine.usage()
    machine.go_on(1.0, 1.0)
    usage.sample()
    machine.host = psutil.AccessDenied()
    for _ in range(3):
        usage.sample()
    assert usage.values()
    machine.now += STALE_S + 1
    assert usage.values() == {}
    assert caplog.text.count("not measured for now") == 1


def test_each_row_of_a_role_gets_the_values() -> None:
    class Rows(Sink):
        def __init__(self) -> None:
            self.rows: list[Mapping[str, Value]] = []

        def log(self, step: int, values: Mapping[str, Value]) -> None:
            self.rows.append({"step": step, **values})

        def close(self) -> None:
            self.rows.append({"closed": 1.0})

    sink, machine = Rows(), Machine()
    usage = machine.usage()
    machine.go_on(2.0, 1.0)
    usage.sample()
    metrics = WithUsage(sink, usage)
    metrics.log(3, {"loss": 1.0})
    metrics.close()
    assert sink.rows == [{"step": 3, "loss": 1.0, "usage/cpu_cores": 0.5, "usage/memory_gb": 1.0}, {"closed": 1.0}]


@pytest.mark.slow
def test_a_process_samples_itself() -> None:
    with usage_of_this_process() as usage:
        values = until(usage.values)
    assert values["usage/memory_gb"] > 0.01
