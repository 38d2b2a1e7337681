"""The facts about a host: plain values, which `gathering` reads and `checks` judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.machine.gpus import GpuFact


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """`devices` is the number of NVIDIA GPUs on the PCI bus. The driver shows `gpus`, or fails with `driver_error`.
    torch uses `torch_gpus` of them. `torch_cuda` is the CUDA version that torch was built for, and `nccl` is its NCCL
    version; each is empty if torch lacks it. `visible` is CUDA_VISIBLE_DEVICES, `None` if it is not set.
    `has_infiniband`: there is an RDMA device. `missing_to_compile` lists the missing programs and headers that
    compiling a layer needs."""

    devices: int = 0
    gpus: Sequence[GpuFact] = ()
    driver: str = ""
    driver_error: str = ""
    torch_gpus: int = 0
    torch_cuda: str = ""
    torch_error: str = ""
    nccl: str = ""
    visible: str | None = None
    has_infiniband: bool = False
    missing_to_compile: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AddressFact:
    """An address that processes use. `key` is its configuration key. `is_here`: this host must listen there; otherwise
    it must reach the address. `error` is the reason of a failure, else empty. `since_start_s` are the seconds since the
    run was started; `None`: it does not run.
    """

    key: str
    address: str
    is_here: bool
    error: str = ""
    since_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class LauncherFact:
    """A requirement of `cluster.launcher` on the host that starts the run. `error` says why it is not met."""

    needs: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostMark:
    """The mark that a host leaves in the shared folder for other hosts. `skew_s` is the host's clock minus the clock of
    the folder's disk. `versions` has the versions of Python and of the packages that must be alike. `server_key` is the
    public key that its clients trust.
    """

    host: str
    skew_s: float
    versions: Mapping[str, str]
    server_key: str = ""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The folder of the runs. `error` says why it could not be written and read. `free` is in bytes, and `kind` is the
    type of the file system. `marks` has the marks of all hosts that were examined lately, this host's first."""

    path: str
    error: str = ""
    free: int = 0
    kind: str = ""
    marks: Sequence[HostMark] = ()


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """The folder of keys. `errors` has a line for each faulty file. `is_allowed`: the server's list of clients has this
    host's client; `None`: this host does not have the list."""

    path: str
    errors: Sequence[str] = ()
    is_allowed: bool | None = None


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """`missing` lists the requirements that are not installed. `unfit` lists the requirements that the installed
    version does not meet, each with that version. `unpinned` lists (package, installed version, version in
    constraints.txt) where the two versions differ. `extras` says which extras are complete. `error`: asyncrl is not
    installed as a package."""

    missing: Sequence[str] = ()
    unfit: Sequence[tuple[str, str]] = ()
    unpinned: Sequence[tuple[str, str, str]] = ()
    extras: Mapping[str, bool] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The limits of a process: the number of open `files`, and of `locked` bytes; -1 without a limit. `shared_memory`
    is the size of /dev/shm in bytes, of which `shared_memory_free` are free. `first_outgoing_port` is the first port
    that Linux gives to outgoing connections."""

    files: int
    locked: int
    shared_memory: int
    shared_memory_free: int
    first_outgoing_port: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about a host. `launcher` is empty for a run on one host. `keys` is `None` if no folder of keys is
    configured. `server_python` is the Python that starts servers, empty if the run starts none. `server_version` is the
    version of its SGLang, or `server_error` says why there is no SGLang.
    """

    host: str
    python: str
    accelerators: AcceleratorFacts
    limits: LimitFacts
    folder: FolderFacts
    packages: PackageFacts
    addresses: Sequence[AddressFact] = ()
    launcher: Sequence[LauncherFact] = ()
    keys: KeyFacts | None = None
    server_python: str = ""
    server_version: str = ""
    server_error: str = ""
