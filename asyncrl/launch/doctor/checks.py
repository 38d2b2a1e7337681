"""Judges the facts of a host: each check finds that all is in order, or names a fault and its fix. The checks see only
the facts, not the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from asyncrl.config.bind import is_loopback
from asyncrl.launch.doctor.facts import AcceleratorFacts, AddressFact, HostFacts, HostMark
from asyncrl.machine.numa import visible_gpus
from asyncrl.machine.ports import PORTS

GB = 1e9
FEWEST_FILES, ENOUGH_FILES = 1024, 4096
SHARED_MEMORY = 1e9
"""Bytes that NCCL and the learner's ranks need in /dev/shm if several GPUs of a host work together."""
LEAST_FREE, LITTLE_FREE = 1e9, 20e9
MOST_SKEW_S = 2.0
BUSY_SHARE = 0.1
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "beegfs", "gpfs", "ceph")
STARTING_S = 300.0
"""Roles may load models for this long before they listen."""
SHOWN = 5
SPANS_SINCE = (0, 5, 22)
"""The first version of SGLang that continues its running requests while it gets new weights. `SglangServer` has this
constant, too, but its module would load torch and transformers, which may be broken on this host.
"""


class Severity(StrEnum):
    """The severity of a finding. Only a problem keeps a run from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The finding of one check; `mend` is the fix, empty if none is needed."""

    check: str
    verdict: Severity
    text: str
    mend: str = ""


Check = Callable[[HostFacts], Iterator[Diagnosis]]


def examine(facts: HostFacts) -> list[Diagnosis]:
    """Run all checks, and return their diagnoses."""
    return [each for check in CHECKS for each in check(facts)]


def gpus(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that torch uses all GPUs of the host."""
    here = facts.accelerators
    shown = max(here.devices, len(here.gpus))
    if not shown:
        yield Diagnosis("gpus", Severity.OK, "this host has no NVIDIA GPU, so everything runs on the CPU")
        return
    if here.driver_error or not here.gpus:
        reason = here.driver_error or "nvidia-smi lists none"
        yield Diagnosis(
            "gpus",
            Severity.PROBLEM,
            f"the host has {shown} NVIDIA GPUs, but the driver does not work: {reason}",
            "install NVIDIA's driver, or start the container with its GPUs (such as `--gpus all`)",
        )
        return
    expected = len(here.gpus) if here.visible is None else len(visible_gpus(here.visible))
    if here.torch_gpus < expected:
        yield _unseen(here, expected)
    else:
        limited = f", as CUDA_VISIBLE_DEVICES={here.visible} says" if here.visible is not None else ""
        names = ", ".join(sorted({gpu.name for gpu in here.gpus}))
        text = f"torch uses {here.torch_gpus} of {len(here.gpus)} GPUs{limited} ({names}), driver {here.driver}"
        yield Diagnosis("gpus", Severity.OK, text)
    yield from _used(here)


def _unseen(here: AcceleratorFacts, expected: int) -> Diagnosis:
    if not here.torch_cuda:
        mend = "install a build of torch for CUDA (https://pytorch.org/get-started/locally)"
        text = f"torch was built without CUDA, so it uses none of {expected} GPUs"
        return Diagnosis("gpus", Severity.PROBLEM, text, mend)
    reason = f": {here.torch_error}" if here.torch_error else ""
    return Diagnosis(
        "gpus",
        Severity.PROBLEM,
        f"torch uses {here.torch_gpus} of {expected} GPUs{reason}",
        f"driver {here.driver} must be new enough for CUDA {here.torch_cuda}: update it, or install a torch for an "
        "older CUDA; CUDA_VISIBLE_DEVICES must name GPUs that exist",
    )


def _usable(here: AcceleratorFacts) -> Sequence[int]:
    """The numbers of the GPUs that a run may use, or of all GPUs if CUDA_VISIBLE_DEVICES has no numbers."""
    every = range(len(here.gpus))
    named = None if here.visible is None else visible_gpus(here.visible)
    if named is None or not all(map(str.isdecimal, named)):
        return every
    return [index for index in map(int, named) if index in every]


def _used(here: AcceleratorFacts) -> Iterator[Diagnosis]:
    usable = {index: here.gpus[index] for index in _usable(here)}
    used = [index for index, gpu in usable.items() if gpu.used > BUSY_SHARE * gpu.memory]
    if used:
        yield Diagnosis(
            "gpus",
            Severity.WARNING,
            f"memory of GPU {_listed(used)} is in use",
            "`nvidia-smi` names the processes; end any that an earlier run has left",
        )
    exclusive = [index for index, gpu in usable.items() if gpu.compute_mode not in ("Default", "[N/A]")]
    if exclusive:
        yield Diagnosis(
            "gpus",
            Severity.WARNING,
            f"GPU {_listed(exclusive)} takes one process at a time ({here.gpus[exclusive[0]].compute_mode})",
            "roles cannot share it; `nvidia-smi --compute-mode=0` allows several processes",
        )


def nccl(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that several GPUs can work together."""
    here = facts.accelerators
    if here.torch_gpus < 2:
        yield Diagnosis("nccl", Severity.OK, "not needed with fewer than two GPUs on a host")
    elif not here.nccl:
        mend = "install a build of torch with NCCL; the learner's ranks exchange gradients by it"
        yield Diagnosis("nccl", Severity.PROBLEM, "torch has no NCCL", mend)
    else:
        yield Diagnosis("nccl", Severity.OK, f"NCCL {here.nccl}")


def compiler(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the learner can compile its layers for a GPU."""
    here = facts.accelerators
    if not here.torch_gpus:
        yield Diagnosis("compiler", Severity.OK, "not needed without a GPU")
    elif here.missing_to_compile:
        mend = "install them (`apt install gcc python3-dev` on Debian and Ubuntu), or set model.compile=false"
        text = f"there is no {' and no '.join(here.missing_to_compile)}, which the learner needs to compile its layers"
        yield Diagnosis("compiler", Severity.PROBLEM, text, mend)
    else:
        yield Diagnosis("compiler", Severity.OK, "a C compiler and Python's headers are installed")


def files(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that a process may open enough files and sockets."""
    limit = facts.limits.files
    if limit == -1 or limit >= ENOUGH_FILES:
        yield Diagnosis("open files", Severity.OK, "no limit" if limit == -1 else f"{limit:,} a process")
        return
    verdict = Severity.PROBLEM if limit < FEWEST_FILES else Severity.WARNING
    mend = "`ulimit -n 65536` before the start, or LimitNOFILE= of the service, or nofile in limits.conf"
    yield Diagnosis(
        "open files", verdict, f"{limit:,} a process; the replay needs several for each actor and scorer", mend
    )


def memory(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that locked and shared memory suffice for GPUs that exchange data."""
    limits, several = facts.limits, facts.accelerators.torch_gpus > 1
    if facts.accelerators.has_infiniband and limits.locked != -1:
        text = f"{limits.locked:,} bytes may be locked, and the host has an RDMA network, which locks more"
        yield Diagnosis("locked memory", Severity.PROBLEM, text, "`ulimit -l unlimited`, or memlock in limits.conf")
    else:
        yield Diagnosis("locked memory", Severity.OK, "no limit" if limits.locked == -1 else "not needed without RDMA")
    free = limits.shared_memory_free
    if several and free < SHARED_MEMORY:
        text = (
            f"{free / GB:.2f} of {limits.shared_memory / GB:.2f} GB are free in /dev/shm, too little for several GPUs"
        )
        yield Diagnosis(
            "shared memory", Severity.PROBLEM, text, "start the container with --shm-size=16g or --ipc=host"
        )
    else:
        yield Diagnosis("shared memory", Severity.OK, f"{free / GB:.1f} GB are free in /dev/shm")


def ports(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that this host can listen at the addresses of the run, or reach them."""
    for each in facts.addresses:
        name = f"{each.key} {each.address}"
        if not each.error:
            yield Diagnosis("ports", Severity.OK, f"{name} {'is free' if each.is_here else 'answers'}")
        elif each.is_here:
            mend = "end the process that listens there (`ss -ltnp` names it), or set another port; 0 chooses a free one"
            yield Diagnosis("ports", Severity.PROBLEM, f"this host cannot listen at {name}: {each.error}", mend)
        elif each.since_start_s is not None and each.since_start_s < STARTING_S:
            text = f"{name} cannot be reached: {each.error}; the run was started {each.since_start_s:.0f} s ago"
            yield Diagnosis("ports", Severity.WARNING, text, "look again in some minutes, or see the logs of the run")
        else:
            yield Diagnosis("ports", Severity.PROBLEM, f"{name} cannot be reached: {each.error}", _reach(each))
    first = facts.limits.first_outgoing_port
    if first < PORTS.stop:
        text = f"Linux may use ports that asyncrl chooses (below {PORTS.stop}) for outgoing connections (from {first})"
        mend = f"`sysctl net.ipv4.ip_local_port_range='{PORTS.stop} 60999'`, or set the ports of the run"
        yield Diagnosis("ports", Severity.WARNING, text, mend)
    elif not facts.addresses:
        yield Diagnosis("ports", Severity.OK, "no address is configured, so none was tried")


def _reach(address: AddressFact) -> str:
    if is_loopback(address.address.rpartition(":")[0]):
        return "start the run; it listens there within some minutes, else see its logs"
    return "start the run; let firewalls pass the port; the other host must not listen at 127.0.0.1"


def folder(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the folder of the runs can be written, has room, and is the same on all hosts."""
    there = facts.folder
    if there.error:
        mend = "mount it, let this user write there, or choose another folder (run.dir)"
        yield Diagnosis("folder", Severity.PROBLEM, f"{there.path} cannot be used: {there.error}", mend)
        return
    hosts = [mark.host for mark in there.marks]
    others = f"; shared with {', '.join(hosts[1:])}" if hosts[1:] else "; no other host has run asyncrl doctor there"
    yield Diagnosis("folder", Severity.OK, f"{there.path} can be written and read ({there.kind}){others}")
    if there.kind.startswith(NETWORK_FILE_SYSTEMS):
        yield Diagnosis(
            "folder",
            Severity.WARNING,
            f"{there.path} is on a network file system ({there.kind}), where the replay's store must not be",
            "run the replay on a host where runs/NAME/replay is on a local disk, or links to one",
        )
    room = f"{there.free / GB:.1f} GB are free in {there.path}"
    if there.free >= LITTLE_FREE:
        yield Diagnosis("disk", Severity.OK, room)
    else:
        mend = "make room, or choose a folder on another disk (run.dir): checkpoints take 12 bytes a parameter"
        yield Diagnosis("disk", Severity.PROBLEM if there.free < LEAST_FREE else Severity.WARNING, room, mend)


def clocks(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the clocks of the other hosts, and of the shared folder, agree with the clock of this host."""
    marks = facts.folder.marks
    if not marks:
        return
    own_skew_s = marks[0].skew_s or 0.0
    others = [(mark.host, mark.skew_s - own_skew_s) for mark in marks[1:] if mark.skew_s is not None]
    off = [(host, skew) for host, skew in (("the folder", -own_skew_s), *others) if abs(skew) > MOST_SKEW_S]
    if off:
        text = ", ".join(
            f"the clock of {host} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}" for host, skew in off
        )
        mend = "let all hosts follow a time server (chrony or systemd-timesyncd), so that times in metrics agree"
        yield Diagnosis("clock", Severity.WARNING, f"compared with this host, {text}", mend)
    else:
        seen = f"{len(others)} other hosts" if others else "the folder"
        yield Diagnosis("clock", Severity.OK, f"within {MOST_SKEW_S:.0f} s of {seen}")


def keys(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the keys can be used, are private, and are the same on the other hosts."""
    if facts.keys is None:
        yield Diagnosis("keys", Severity.OK, "no keys are configured: only this host can connect")
        return
    path, wrong = facts.keys.path, False
    for error in facts.keys.errors:
        wrong = True
        yield Diagnosis("keys", Severity.PROBLEM, error, "docs/security.md says which host needs which files")
    if facts.keys.is_allowed is False:
        wrong = True
        mend = (
            "copy client.secret of a client in the list `allowed`, or make one: `asyncrl keys --out DIR --client NAME`"
        )
        yield Diagnosis(
            "keys", Severity.PROBLEM, f"{path}: the list `allowed` lacks the key that belongs to client.secret", mend
        )
    if others := _different(facts.folder.marks, lambda mark: mark.server_key):
        wrong = True
        text = f"{path}: server.public differs from the one on {', '.join(others)}"
        yield Diagnosis("keys", Severity.PROBLEM, text, "copy server.public of the replay's host to all others")
    if not wrong:
        yield Diagnosis("keys", Severity.OK, f"the keys in {path} can be used")


def packages(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the Python packages are installed, in the same versions on all hosts."""
    found = facts.packages
    if found.error:
        yield Diagnosis("packages", Severity.WARNING, found.error, "`make install`, or `pip install PATH_OF_CHECKOUT`")
    wrong = [f"{each} is missing" for each in found.missing]
    wrong += [f"{requirement} is needed, {version} is installed" for requirement, version in found.unfit]
    if wrong:
        mend = "`make install`, or install asyncrl again with pip"
        yield Diagnosis("packages", Severity.PROBLEM, _listed(wrong, "; "), mend)
    if found.unpinned:
        differ = [f"{name} {there} instead of {pinned}" for name, there, pinned in found.unpinned]
        text = f"{len(differ)} versions differ from constraints.txt: {_listed(differ)}"
        yield Diagnosis("packages", Severity.WARNING, text, "`make install`; asyncrl is tested with constraints.txt")
    if others := _different(facts.folder.marks, lambda mark: mark.versions):
        own = ", ".join(f"{name} {version}" for name, version in facts.folder.marks[0].versions.items())
        text = f"this host has {own}; other versions are on {', '.join(others)}"
        yield Diagnosis("packages", Severity.PROBLEM, text, "install the same versions on all hosts of a run")
    if not wrong and not found.error:
        extras = ", ".join(name for name, complete in found.extras.items() if complete) or "none"
        yield Diagnosis("packages", Severity.OK, f"installed, with Python {facts.python}; complete extras: {extras}")


def servers(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that the program of `engine.python` can start the servers of a run."""
    if facts.server_error:
        mend = "install SGLang there, or set engine.python to another Python (docs/engines.md)"
        yield Diagnosis("servers", Severity.PROBLEM, f"{facts.server_python}: {facts.server_error}", mend)
    elif facts.server_python:
        text = f"{facts.server_python} has SGLang {facts.server_version}"
        yield Diagnosis("servers", Severity.OK, f"{text}{_older(facts.server_version)}")


def _older(version: str) -> str:
    """Return a note for a version of SGLang before `SPANS_SINCE`, or an empty text for a newer or unknown version."""
    try:
        is_older = Version(version).release < SPANS_SINCE
    except InvalidVersion:
        return ""
    since = ".".join(map(str, SPANS_SINCE))
    return f"; before {since}, each push of new weights interrupts its requests" if is_older else ""


def launcher(facts: HostFacts) -> Iterator[Diagnosis]:
    """Check that this host can start a run on several hosts."""
    for each in facts.launcher:
        if each.error:
            mend = "mend it on the host that starts the run; other hosts need not start runs"
            yield Diagnosis("launcher", Severity.PROBLEM, f"{each.needs}: {each.error}", mend)
        else:
            yield Diagnosis("launcher", Severity.OK, f"{each.needs} works")


CHECKS: Sequence[Check] = (
    gpus,
    nccl,
    compiler,
    files,
    memory,
    ports,
    launcher,
    folder,
    clocks,
    keys,
    packages,
    servers,
)


def _different(marks: Sequence[HostMark], value: Callable[[HostMark], object]) -> list[str]:
    """Return the hosts with a value that differs from this host's."""
    return [mark.host for mark in marks[1:] if value(mark) and value(mark) != value(marks[0])]


def _listed(values: Sequence[object], separator: str = ", ") -> str:
    more = f"{separator}and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
    return separator.join(map(str, values[:SHOWN])) + more
