"""Reads the facts of this host: its GPUs, limits, packages and programs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from asyncrl.engine.sglang.probe import sglang_version
from asyncrl.launch.doctor.facts import (
    AcceleratorFacts,
    AddressFact,
    HostFacts,
    KeyFacts,
    LauncherFact,
    LimitFacts,
    PackageFacts,
)
from asyncrl.launch.doctor.sharing import share
from asyncrl.machine.gpus import driver_gpus
from asyncrl.text import reason_of
from asyncrl.version import PACKAGE

PCI, NVIDIA, DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"
RDMA = Path("/sys/class/infiniband")
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LINUX_FIRST_PORT = 32768
ALIKE = ("asyncrl", "torch", "transformers", "msgspec")
"""Packages that must be alike on all hosts of a run: they compute log-probs, or write and read messages."""


def gather(
    folder: Path,
    addresses: Sequence[AddressFact],
    keys: KeyFacts | None,
    server_key: str,
    server_python: str = "",
    launcher: Sequence[LauncherFact] = (),
) -> HostFacts:
    """Gather the facts of this host, and leave its mark in `folder`, the folder of all runs. `server_python` is the
    Python that starts servers, or empty if the run starts none.
    """
    host, python = socket.gethostname(), platform.python_version()
    versions = {"Python": python, **{name: _version(name) for name in ALIKE if _version(name)}}
    server_version, server_error = sglang_version(server_python) if server_python else ("", "")
    return HostFacts(
        host=host,
        python=python,
        accelerators=_accelerators(),
        limits=_limits(),
        folder=share(folder, host, versions, server_key),
        packages=_packages(),
        addresses=addresses,
        launcher=launcher,
        keys=keys,
        server_python=server_python,
        server_version=server_version,
        server_error=server_error,
    )


def _accelerators() -> AcceleratorFacts:
    gpus, driver, driver_error = driver_gpus()
    torch_gpus, torch_cuda, torch_error, nccl = _torch()
    return AcceleratorFacts(
        devices=_devices(),
        gpus=gpus,
        driver=driver,
        driver_error=driver_error,
        torch_gpus=torch_gpus,
        torch_cuda=torch_cuda,
        torch_error=torch_error,
        nccl=nccl,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        has_infiniband=RDMA.is_dir() and any(RDMA.iterdir()),
        missing_to_compile=list(missing_to_compile(os.environ, Path(sysconfig.get_path("include")))),
    )


def missing_to_compile(environment: Mapping[str, str], headers: Path) -> Iterator[str]:
    """Yield the programs and headers that are missing here, and that Triton needs to build the C part of a kernel."""
    path = environment.get("PATH", "")
    if "CC" not in environment and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        yield "C compiler"
    if not (headers / "Python.h").is_file():
        yield f"{headers / 'Python.h'}"


def _devices() -> int:
    def read(path: Path) -> str:
        return path.read_text().strip() if path.is_file() else ""

    devices = PCI.iterdir() if PCI.is_dir() else ()
    return sum(read(each / "vendor") == NVIDIA and read(each / "class").startswith(DISPLAY) for each in devices)


def _torch() -> tuple[int, str, str, str]:
    """Return the number of GPUs that torch uses, its CUDA version, its error if it uses none, and its NCCL version."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return 0, "", reason_of(error), ""
    count, error_text, nccl = torch.cuda.device_count(), "", ""
    if torch.version.cuda:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            count, error_text = 0, str(error).splitlines()[0]
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return count, torch.version.cuda or "", error_text, nccl


def _limits() -> LimitFacts:
    shared = shutil.disk_usage("/dev/shm")
    return LimitFacts(
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory=shared.total,
        shared_memory_free=shared.free,
        first_outgoing_port=int(OUTGOING_PORTS.read_text().split()[0])
        if OUTGOING_PORTS.is_file()
        else LINUX_FIRST_PORT,
    )


def _packages() -> PackageFacts:
    try:
        needed = [Requirement(each) for each in requires("asyncrl") or ()]
    except PackageNotFoundError:
        return PackageFacts(error="asyncrl is not installed as a package, so its requirements were not checked")
    plain = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    optional = [each for each in needed if each not in plain]
    extras: dict[str, bool] = {}
    for name in sorted({extra for each in optional for extra in _extras(each)}):
        of_extra = [each for each in optional if each.marker is not None and each.marker.evaluate({"extra": name})]
        extras[name] = all(_fits(each) for each in of_extra)
    return PackageFacts(
        missing=[str(each) for each in plain if not _version(each.name)],
        unfit=[(str(each), _version(each.name)) for each in plain if _version(each.name) and not _fits(each)],
        unpinned=list(_unpinned({each.name.lower() for each in needed})),
        extras=extras,
    )


def _extras(requirement: Requirement) -> list[str]:
    """Return the extras that a marker such as `extra == 'math'` names."""
    return [word.strip("'\"") for word in str(requirement.marker).split() if word[:1] in "'\""]


def _fits(requirement: Requirement) -> bool:
    there = _version(requirement.name)
    return bool(there) and requirement.specifier.contains(there, prereleases=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _unpinned(names: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the packages among `names` whose version differs from the constraints.txt of the checkout, with both
    versions."""
    constraints = PACKAGE.parent / "constraints.txt"
    lines = constraints.read_text().splitlines() if constraints.is_file() else []
    for name, sign, pinned in (line.partition("==") for line in lines):
        # A build of torch for CUDA adds the CUDA version to its own, such as 2.9.0+cu128.
        there = _version(name).partition("+")[0] if sign and name.lower() in names else ""
        if there and there != pinned.strip().partition("+")[0]:
            yield name, there, pinned.strip()
