"""The facts about a host: plain values, which `gathering` reads and `checks` judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.machine.gpus import GpuFact


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """The facts about GPUs, and about the software that uses them.

    - `devices`: the number of NVIDIA GPUs on the PCI bus;
    - `gpus`: the GPUs that the driver shows. `driver_error`: why the driver fails, else empty;
    - `torch_gpus`: the number of GPUs that torch uses;
    - `torch_cuda`, `nccl`: the versions of torch's CUDA and of its NCCL, empty if it has none;
    - `visible`: CUDA_VISIBLE_DEVICES; `None`: the variable is not set;
    - `has_infiniband`: there is an RDMA device;
    - `missing_to_compile`: the missing programs and headers that compiling a layer needs.
    """

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
    """An address that processes use.

    - `key`: its configuration key;
    - `is_here`: this host must listen at the address; otherwise this host must reach it;
    - `error`: the reason of a failure, else empty;
    - `since_start_s`: the seconds since the run was started; `None`: the run is not running.
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
    """The mark that a host leaves in the shared folder for other hosts.

    - `skew_s`: the host's clock minus the clock of the folder's disk; `None` if it is unknown;
    - `versions`: maps Python and the packages that must be alike to their versions;
    - `server_key`: the server's public key that clients on the host trust.
    """

    host: str
    skew_s: float | None
    versions: Mapping[str, str]
    server_key: str = ""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The folder of the runs.

    - `error`: why the folder could not be written and read, else empty;
    - `free`: the free bytes of its disk;
    - `kind`: the type of its file system;
    - `marks`: the marks of all hosts that were examined lately, this host's first.
    """

    path: str
    error: str = ""
    free: int = 0
    kind: str = ""
    marks: Sequence[HostMark] = ()


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """The folder of keys.

    - `errors`: the faults of its files;
    - `is_allowed`: the server's list of clients has this host's client; `None`: this host does not have the list.
    """

    path: str
    errors: Sequence[str] = ()
    is_allowed: bool | None = None


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """The facts about asyncrl's requirements.

    - `missing`: the requirements that are not installed;
    - `unfit`: the requirements that the installed version does not meet, each with that version;
    - `unpinned`: (package, installed version, version in constraints.txt) where the two versions differ;
    - `extras`: maps the name of each extra to True if all its packages are installed;
    - `error`: why nothing was checked, empty if asyncrl is installed as a package.
    """

    missing: Sequence[str] = ()
    unfit: Sequence[tuple[str, str]] = ()
    unpinned: Sequence[tuple[str, str, str]] = ()
    extras: Mapping[str, bool] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The limits of a process.

    - `files`, `locked`: the maximum numbers of files that it may open, and of bytes that it may lock; -1: no limit;
    - `shared_memory`, `shared_memory_free`: the bytes of /dev/shm, and how many of them are free;
    - `first_outgoing_port`: the first port that Linux gives to outgoing connections.
    """

    files: int
    locked: int
    shared_memory: int
    shared_memory_free: int
    first_outgoing_port: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about a host.

    - `launcher`: empty for a run on one host;
    - `keys`: `None` if no folder of keys is configured;
    - `server_python`: the Python that starts servers, empty if the run starts none;
    - `server_version`: the version of SGLang in `server_python`;
    - `server_error`: why `server_python` has no SGLang, else empty.
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
