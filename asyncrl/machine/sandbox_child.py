"""The script that `sandbox.run` starts: it confines a program, runs it, and ends all that it has started.

Three processes, each a fork of the one before. The launcher enters the namespaces. The watcher, their first process,
builds the root folder and waits for the program or the caller, whichever ends first; with it the kernel ends whatever
is left in the namespaces. The program has no rights over either. Without namespaces the launcher watches: whatever the
program leaves behind becomes the launcher's child, and is killed.

The arguments are those of `Settings`; on the control socket the watcher reports `status N` or `failed REASON`, and
reads nothing but the caller's end. Every call reads this file, so it imports little: the standard library alone, and of
that neither pathlib nor typing.
"""

import ctypes
import errno
import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MS_RELATIME, ST_RELATIME, SAME_FLAGS = 1 << 21, 4096, 0xC0F
MNT_DETACH = 2
CAPABILITY_VERSION = 0x20080522

LOOK_S = 0.1
"""Between two looks at what the kernel does not limit: the memory of all processes together, and in places how many
there are."""
FIRST_SPARE_ID, FEW_IDS, SPARE_IDS = 0x60000000, 50_000, 10_000
"""Where users that nobody is begin: usually, and in a container that has but 65,536 of them; and how many are used."""

SCRATCH = ("/jail/tmp", "/jail/dev/shm")

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x50000 | errno.EPERM
CALLS = {"x86_64": (0xC000003E, 41, 29), "aarch64": (0xC00000B7, 198, 194)}
"""By machine: its number in a filter of system calls, and those of `socket` and `shmget`."""
IO_URING_SETUP, X32_CALLS = 425, 0x40000000
FAMILIES = (1, 2, 10, 16)
"""Of sockets that namespaces keep apart: Unix, IPv4, IPv6, netlink."""

libc = ctypes.CDLL(None, use_errno=True)


class Settings:
    """The arguments: the control socket, the file of the program, 1 for namespaces or 0, CPU seconds, bytes of memory,
    of a file and of the private folders, processes, and the paths that stay visible. `proc` is where the watcher finds
    the processes."""

    def __init__(self, arguments: list[str]) -> None:
        numbers = map(int, arguments[:8])
        self.control, self.source, namespaces, self.cpu_s, self.memory, self.file, self.disk, self.processes = numbers
        self.namespaces = bool(namespaces)
        self.proc = "/jail/proc" if namespaces else "/proc"
        self.visible = arguments[8:]
        self.user = spare_user()
        if not self.namespaces and self.user is not None and not readable_by(self.user):
            self.user = None
        # In namespaces of an ordinary user, processes are counted on their own since Linux 5.14.
        fresh = self.namespaces and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)
        self.kernel_counts = self.user is not None or fresh


def main() -> None:
    settings = Settings(sys.argv[1:])
    try:
        if settings.namespaces:
            enter_namespaces(settings.user)
            watcher = os.fork()
            if watcher:
                os.waitpid(watcher, 0)
                os._exit(0)
            build_root(settings)
        else:
            become_subreaper()
        program = watch(settings)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        os.write(settings.control, f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)
    run(program)


# Who the program is


def spare_user() -> "int | None":
    """The id of a user that nobody is, where this process is root and may become it. A number of its own for each call
    has a count of processes of its own."""
    if os.geteuid() != 0:
        return None
    for first in (FIRST_SPARE_ID, FEW_IDS):
        user = first + os.getpid() % SPARE_IDS
        if all(is_mapped(user, kind) for kind in ("uid", "gid")):
            return user
    return None


def is_mapped(number: int, kind: str) -> bool:
    try:
        with open(f"/proc/self/{kind}_map") as ranges:
            return any(int(first) <= number < int(first) + int(size) for first, _, size in map(str.split, ranges))
    except OSError:
        return False


def readable_by(user: int) -> bool:
    """Whether `user` could go on with this Python."""
    try:
        os.seteuid(user)
    except OSError:
        return False
    try:
        return os.access(os.__file__, os.R_OK, effective_ids=True) and os.access(
            sys.executable, os.X_OK, effective_ids=True
        )
    finally:
        os.seteuid(0)


# Namespaces


def enter_namespaces(user: "int | None") -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if user is not None:
        call("unshare", flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | CLONE_NEWUSER)
    # Not as 0: a program that is root in its namespace would get its rights back when it starts another.
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"1000 {uid} 1")
    write("/proc/self/gid_map", f"1000 {gid} 1")


def build_root(settings: Settings) -> None:
    """/jail of a new root: the visible paths, read-only, and private, bounded folders. All else is gone.

    The program's root will be the jail, not the root of the mount namespace: the kernel refuses user namespaces, in
    which the program could mount what it likes, to whoever has another root.
    """
    os.umask(0o022)
    real = {path: os.path.realpath(path) for path in settings.visible if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in settings.visible if os.path.islink(path)}
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/jail")
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for folder in SCRATCH:
        os.makedirs(folder)
        size = f"size={settings.disk},nr_inodes={max(64, settings.disk >> 12)},mode=1777"
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for path, target in links.items():
        os.makedirs(os.path.dirname("/jail" + path), exist_ok=True)
        os.symlink(target, "/jail" + path)
    for path, source in real.items():
        bind("/old" + source, "/jail" + path)
    make_read_only("/old/proc/self/mountinfo")
    os.mkdir("/jail/proc")
    mount_proc("/jail/proc")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def bind(source: str, target: str) -> None:
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o600))
    mount(source, target, None, MS_BIND | MS_REC)


def make_read_only(mounts: str) -> None:
    """Every mount within the jail, for a flag holds for one mount only; flags that it has already must stay."""
    with open(mounts, "rb") as lines:
        escaped = [line.split()[4] for line in lines]
    for target in map(unescape, escaped):
        if target.startswith("/jail/") and target not in SCRATCH:
            now = os.statvfs(target).f_flag
            same = now & SAME_FLAGS | (MS_RELATIME if now & ST_RELATIME else 0)
            mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | same)


def unescape(path: bytes) -> str:
    r"""Of /proc: a space is written as \040."""
    first, *others = path.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in others))


def mount_proc(folder: str) -> None:
    """The processes of the namespace, and without the settings of the machine where the kernel can leave them out."""
    try:
        mount("proc", folder, "proc", MS_NOSUID | MS_NODEV, "subset=pid")
    except OSError:
        mount("proc", folder, "proc", MS_NOSUID | MS_NODEV)


def mount(source: "str | None", target: str, kind: "str | None", flags: int, data: "str | None" = None) -> None:
    texts = [None if each is None else each.encode() for each in (source, target, kind, data)]
    try:
        call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {target}: {error.strerror}") from None


def call(function: str, *arguments: object) -> None:
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# Watching


def watch(settings: Settings) -> str:
    """Start the program, and end with it and all its children. Returns in the program's process alone: its source."""
    source = os.pread(settings.source, os.fstat(settings.source).st_size, 0).decode()
    os.close(settings.source)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The kernel keeps from the first process of a namespace only those signals that it has no handler for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    problem, tell = os.pipe()
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (settings.control, woken, wake, problem):
            os.close(fd)
        confine(settings, tell)
        return source
    os.close(tell)
    status = wait(program, woken, settings)
    if not settings.namespaces:
        kill_descendants()
    failed = read_all(problem)
    # The caller may have gone.
    with suppress(OSError):
        os.write(settings.control, b"failed " + failed if failed else b"status %d" % status)
    os._exit(0)


def wait(program: int, woken: int, settings: Settings) -> int:
    """The status of `program`, as a shell would give it: that of a kill where the caller has gone, or where its
    processes are too many or take too much memory together."""
    poll = select.poll()
    poll.register(settings.control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        status = reap(program)
        if status is not None:
            return status
        ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
        if settings.control in ready or takes_too_much(settings):
            return 128 + signal.SIGKILL
        if woken in ready:
            os.read(woken, 4096)


def takes_too_much(settings: Settings) -> bool:
    found = descendants(settings.proc)
    if not settings.kernel_counts and len(found) > settings.processes:
        return True
    return sum(memory(f"{settings.proc}/{pid}") for pid in found) > settings.memory


def memory(process: str) -> int:
    """Bytes; what processes share is divided among them where the process lets itself be looked at."""
    with suppress(OSError, ValueError):
        with suppress(PermissionError), open(f"{process}/smaps_rollup", "rb") as rollup:
            return int(rollup.read().partition(b"\nPss:")[2].split()[0]) << 10
        with open(f"{process}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return 0


def reap(program: int) -> "int | None":
    """Reap whatever has ended; the status of `program` if it is among it."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break
    return None


def become_subreaper() -> None:
    with suppress(AttributeError):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Until there is none: some may start others meanwhile."""
    while True:
        for pid in descendants("/proc"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def descendants(proc: str) -> "set[int]":
    parents = {}
    for name in filter(str.isdigit, os.listdir(proc)):
        with suppress(OSError), open(f"{proc}/{name}/stat", "rb") as stat:
            parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    found, known = {os.getpid()}, 0
    while len(found) > known:
        known = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def read_all(fd: int) -> bytes:
    # The program's process has ended, and what it has started had closed this.
    os.set_blocking(fd, False)
    with suppress(BlockingIOError):
        return os.read(fd, 4096)
    return b""


# The program


def confine(settings: Settings, tell: int) -> None:
    """Give up what the program must not have. A failure ends the process, and `tell` says why."""
    try:
        if settings.namespaces:
            os.chroot("/jail")
            os.chdir("/tmp")
        os.setsid()
        if settings.user is not None:
            if not settings.namespaces:
                os.chown(".", settings.user, settings.user)
            os.setgroups([])
            os.setresgid(settings.user, settings.user, settings.user)
            os.setresuid(settings.user, settings.user, settings.user)
        with suppress(AttributeError):
            drop_rights()
        set_limits(settings)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        os.write(tell, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(1)
    os.close(tell)


def drop_rights() -> None:
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refuse_calls()


def refuse_calls() -> None:
    """Refuse what neither namespaces nor limits hold: sockets to the machine below this one (vsock), io_uring, which
    makes sockets that no filter sees, and System V shared memory, which no process need hold and which outlives all."""
    known = CALLS.get(os.uname().machine)
    if known is None or sys.maxsize < 1 << 32:
        return
    machine, socket, shmget = known
    families = len(FAMILIES)
    steps = [
        (LOAD, 0, 0, 4),
        (EQUAL, 0, 6 + families, machine),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 4 + families, 0, X32_CALLS),
        (EQUAL, 3 + families, 0, shmget),
        (EQUAL, 2 + families, 0, IO_URING_SETUP),
        (EQUAL, 0, 2 + families, socket),
        (LOAD, 0, 0, 16),
        *((EQUAL, families - index, 0, family) for index, family in enumerate(FAMILIES)),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    try:
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
    except OSError as error:
        # A kernel without filters, as security.md says.
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise


def set_limits(settings: Settings) -> None:
    limits = [
        (resource.RLIMIT_CPU, settings.cpu_s),
        (resource.RLIMIT_AS, settings.memory),
        (resource.RLIMIT_FSIZE, settings.file),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ]
    if settings.kernel_counts:
        limits.append((resource.RLIMIT_NPROC, settings.processes))
    for kind, value in limits:
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # macOS knows some of them by name only.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def run(source: str) -> None:
    """As `python -I -` would: a failure is printed without the frames of this script."""
    import site

    site.main()
    sys.argv[:] = ["-"]
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(source, "<stdin>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        behind = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(behind), behind)
        sys.exit(1)


if __name__ == "__main__":
    main()
