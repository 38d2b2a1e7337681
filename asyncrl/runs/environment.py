"""Records the environment of a run: host, cores, GPUs, and the versions of asyncrl and of the packages that it uses.

`asyncrl train` adds a record to `environment.json` in the run's folder at each start. Each other host of the learner
has such a file in `host-N/`.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from asyncrl.machine.files import write_whole
from asyncrl.machine.gpus import driver_gpus
from asyncrl.version import PACKAGE, VERSION

ENVIRONMENT_FILE = "environment.json"
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "safetensors", "pyzmq", "lmdb", "msgpack", "msgspec", "pyarrow"),
    *("triton", "flash-attn", "torchao", "sglang", "vllm", "ray"),
)
"""Packages whose version may change the results or the speed of a run."""
DETAILED_STARTS = 50
"""The number of newest starts that are recorded with all details. Earlier starts are recorded with their time only."""
GIT_S = 10.0
CPU_INFO = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Environment:
    """One start of a run on one host.

    - `time` is the time of the start, in seconds since 1970.
    - `cores` is the number of cores that the process may use.
    - `memory` is the memory of the host in bytes.
    - `gpus` has a line for each GPU: its name and its memory.
    - `commit` is the commit of asyncrl's checkout, followed by `+changes` if files differ from the commit. It is
      followed by `+unknown` if git failed to compare the files, or took too long. It is empty without a checkout.
    - `packages` has the version of each installed package of PACKAGES, by the name of the package.
    """

    time: float = 0.0
    host: str = ""
    system: str = ""
    python: str = ""
    asyncrl: str = ""
    commit: str = ""
    cpu: str = ""
    cores: int = 0
    memory: int = 0
    gpus: Sequence[str] = ()
    driver: str = ""
    packages: dict[str, str] | None = None


def record_environment(folder: Path, clock: Callable[[], float] = time.time) -> None:
    """Add this start to the record in a run's folder. If the file cannot be written, this only logs a warning."""
    try:
        starts = [*_recorded(folder), this_environment(clock())]
    except OSError as error:
        # A file that cannot be read now may be intact, so it is not replaced. A file with wrong contents is replaced.
        log.warning("this start was not added to %s: %s", folder / ENVIRONMENT_FILE, error)
        return
    earlier, newest = starts[:-DETAILED_STARTS], starts[-DETAILED_STARTS:]
    values = [*({"time": each.time} for each in earlier), *map(asdict, newest)]
    try:
        text = json.dumps({"starts": values}, indent=2)
        write_whole(folder / ENVIRONMENT_FILE, f"{text}\n")
    except OSError as error:
        log.warning("%s was not written: %s", folder / ENVIRONMENT_FILE, error)


def read_environments(folder: Path) -> list[Environment]:
    """The recorded starts, the oldest first; empty if nothing was recorded, or the file cannot be read."""
    try:
        return _recorded(folder)
    except OSError as error:
        log.warning("%s cannot be read: %s", folder / ENVIRONMENT_FILE, error)
        return []


def _recorded(folder: Path) -> list[Environment]:
    """The recorded starts; empty if nothing was recorded, or the contents are wrong. Raises OSError: the disk cannot
    read the file."""
    try:
        starts = json.loads((folder / ENVIRONMENT_FILE).read_bytes())["starts"]
        # Another version of asyncrl may have written more fields, or fewer.
        return msgspec.convert(starts, list[Environment])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read: %s", folder / ENVIRONMENT_FILE, error)
        return []


def environments_of(run_dir: Path) -> list[Environment]:
    """The newest start of a run on each of its hosts. The start on the first host comes first."""
    folders = [run_dir, *sorted(run_dir.glob("host-*"))]
    return [starts[-1] for folder in folders if (starts := read_environments(folder))]


def this_environment(now: float) -> Environment:
    """The environment of this process on this host."""
    gpus, driver, _ = driver_gpus()
    return Environment(
        time=now,
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        asyncrl=VERSION,
        commit=_commit(PACKAGE.parent),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().total,
        gpus=[f"{gpu.name}, {gpu.memory / 1024:.0f} GiB" for gpu in gpus],
        driver=driver,
        packages={name: found for name in PACKAGES if (found := _version(name))},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():
        return ""
    commit = _git(checkout, "rev-parse", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    if not commit:
        return ""
    return f"{commit}+unknown" if changed is None else f"{commit}+changes" if changed else commit


def _git(checkout: Path, *arguments: str) -> str | None:
    """The output of git; None if it failed, or took longer than GIT_S."""
    command = ["git", "-C", str(checkout), *arguments]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output.stdout.strip() if output.returncode == 0 else None


def _cpu() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
