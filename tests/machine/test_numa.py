"""A child with GPUs runs on the CPUs near to them on a machine with several NUMA nodes. These machines are made up."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from asyncrl.machine import child
from asyncrl.machine.child import start_child
from asyncrl.machine.numa import cpus_near_gpus, format_cpus, parse_cpus, visible_gpus
from tests.helpers import GENEROUS_S

ADDRESSES = ("0000:19:00.0", "0000:3B:00.0", "0000:9b:00.0", "0000:bb:00.0")


def make_machine(root: Path, *nodes: str, models: tuple[str, ...] = ("H",) * len(ADDRESSES)) -> Path:
    """A machine whose GPUs have these lists of near CPUs."""
    for address, cpus, model in zip(ADDRESSES, nodes, models, strict=False):
        gpu, device = root / "proc/driver/nvidia/gpus" / address, root / "sys/bus/pci/devices" / address.lower()
        gpu.mkdir(parents=True)
        device.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nGPU UUID: \t GPU-{address[5:7]}\nDevice Minor: \t 0\n")
        (device / "local_cpulist").write_text(f"{cpus}\n")
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def near(root: Path, visible: str, **environment: str) -> str:
    return format_cpus(cpus_near_gpus({"CUDA_VISIBLE_DEVICES": visible, **environment}, root=root))


@pytest.mark.usefixtures("eight_cpus")
def test_a_child_is_near_to_the_gpus_that_it_sees_by_number_or_name(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0-1,4-5", "0-1,4-5", "2-3,6-7", "2-3,6-7")
    assert near(root, "0") == near(root, "1,0") == near(root, "GPU-19") == "0-1,4-5"
    assert near(root, "2,3") == near(root, "GPU-bb") == "2-3,6-7"
    every = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert format_cpus(cpus_near_gpus(every, only=3, root=root)) == "2-3,6-7", "a rank is near to its own GPU alone"


@pytest.mark.usefixtures("eight_cpus")
def test_nothing_is_bound_where_it_helps_nothing_or_nobody_knows(tmp_path: Path) -> None:
    root = make_machine(tmp_path / "two", "0-3", "4-7", "4-7")
    assert near(root, "") == near(root, "0,1") == near(root, "7") == near(root, "MIG-1") == ""
    assert cpus_near_gpus({}, root=root) == frozenset()
    assert near(root, "0", OMP_NUM_THREADS="4") == "0-3"
    assert near(root, "0", OMP_NUM_THREADS="5") == "", "fewer are near than it has threads"
    assert near(make_machine(tmp_path / "one", "0-7"), "0") == near(tmp_path / "none", "0") == ""
    assert near(make_machine(tmp_path / "elsewhere", "64-127"), "0") == "", "its CPUs are others"
    mixed = make_machine(tmp_path / "mixed", "0-3", "4-7", models=("H", "B"))
    assert (near(mixed, "0"), near(mixed, "GPU-19")) == ("", "0-3")
    assert near(mixed, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == "0-3"
    (mixed / "sys/bus/pci/devices" / ADDRESSES[0] / "local_cpulist").unlink()
    assert near(mixed, "GPU-19") == ""


def test_lists_of_cpus_are_read_and_written_as_linux_writes_them() -> None:
    for text in ("", "5", "0-3", "0-3,8,10-11"):
        assert format_cpus(parse_cpus(f"{text}\n")) == text
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus("some")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_a_started_child_runs_where_its_gpus_are_and_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, other, *_ = sorted(os.sched_getaffinity(0))
    root = make_machine(tmp_path / "machine", str(cpu), str(other))
    monkeypatch.setattr(child, "cpus_near_gpus", partial(cpus_near_gpus, root=root))
    command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    environment = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    start_child(command, tmp_path / "log", environment).wait(GENEROUS_S)
    told = f"asyncrl: bound to the CPUs {other}, which are near to its GPUs\n"
    assert (tmp_path / "log").read_text() == f"{told}{{{other}}}\n"
    start_child(command, tmp_path / "free", environment, near_gpus=False).wait(GENEROUS_S)
    assert str(cpu) in (tmp_path / "free").read_text()


def test_a_word_that_names_no_gpu_ends_the_list_as_for_cuda() -> None:
    assert visible_gpus("2, GPU-8a,MIG-1") == ["2", "GPU-8a", "MIG-1"]
    assert visible_gpus("0,-1,1") == ["0"]
    assert visible_gpus("NoDevFiles") == visible_gpus("-1") == visible_gpus("") == []
