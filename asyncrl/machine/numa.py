"""Finds the CPUs that are near to a GPU.

On a machine of several NUMA nodes, each GPU is attached to one node. Memory belongs to the node of the CPU that touched
it first. Copies between a GPU and memory of another node are slower. Linux tells for each PCI device which CPUs are
near, and the driver of NVIDIA lists its GPUs as PCI devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE, BY_ADDRESS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
THREADS_VARIABLE = "OMP_NUM_THREADS"
ROOT = Path("/")


def visible_gpus(value: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names. As CUDA does, this stops at the first word that names
    no GPU, such as -1, or NoDevFiles of an older Slurm."""
    words = [word.strip() for word in value.split(",")]
    return list(takewhile(lambda word: word.isdecimal() or word.startswith(("GPU-", "MIG-")), words))


def cpus_near_gpus(environment: Mapping[str, str], only: int | None = None, root: Path = ROOT) -> frozenset[int]:
    """Return the CPUs of this process to which a child with this `environment` should be bound: the CPUs near to any
    GPU that the child sees. If `only` is a number, only the child's GPU with this number counts; the first has the
    number 0. Returns an empty set in these cases: the child sees no GPU, all CPUs are near, fewer CPUs are near than
    the child has threads, or a GPU cannot be identified. `root` has the folders `proc` and `sys` of Linux.
    """
    visible = visible_gpus(environment.get(GPU_VARIABLE, ""))
    if only is not None:
        visible = visible[only : only + 1]
    addresses = _addresses(visible, environment.get(ORDER_VARIABLE) == BY_ADDRESS, root) if visible else []
    if not addresses:
        return frozenset()
    mine = os.sched_getaffinity(0)
    near = frozenset[int]().union(*(_local_cpus(address, root) or mine for address in addresses)) & mine
    threads = environment.get(THREADS_VARIABLE, "1")
    return frozenset() if near == mine or len(near) < (int(threads) if threads.isdecimal() else 1) else near


def _addresses(visible: Sequence[str], by_address: bool, root: Path) -> list[str]:
    """Return the PCI addresses of GPUs that numbers or UUIDs name, or an empty list if one of the GPUs is not known."""
    try:
        folders = sorted((root / "proc/driver/nvidia/gpus").iterdir())
        facts = {folder.name: _facts(folder / "information") for folder in folders}
    except OSError:
        return []
    # CUDA numbers GPUs of different models by their speed, and GPUs of one model by their address.
    numbered = by_address or len({each.get("Model") for each in facts.values()}) <= 1
    names = {str(number): address for number, address in enumerate(facts)} if numbered else {}
    names |= {each["GPU UUID"]: address for address, each in facts.items() if "GPU UUID" in each}
    found = [names[each] for each in visible if each in names]
    return found if len(found) == len(visible) else []


def _facts(file: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _local_cpus(address: str, root: Path) -> frozenset[int]:
    """Return the CPUs near to a PCI device, or an empty set if Linux does not tell."""
    try:
        return parse_cpus((root / "sys/bus/pci/devices" / address.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers in a list as Linux writes it, such as `0-3,8`. Raises ValueError: the text is not such a
    list."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def format_cpus(cpus: frozenset[int]) -> str:
    """Write CPUs as a list that `parse_cpus` reads."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
