"""The script that `sandbox.run` starts: it confines a program, runs it, and ends every process that it started.

There are three processes, each a fork of the one before. The launcher enters the namespaces. The watcher is their
first process: it builds the root folder and waits until the program or the caller ends. When the watcher ends, the
kernel ends all processes of the namespaces. The program has no rights over the other two. Without namespaces the
launcher watches: orphans of the program become the launcher's children, and it kills them.

`Options` describes the arguments. On the control socket the watcher reports `status N` or `failed REASON`, and reads
only that the caller has closed it. Every call starts this file, so it imports little: the standard library alone, and
neither pathlib nor typing of that.
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
"""Between two checks of what the kernel does not limit: the memory of all processes together, and on some machines
their number."""
FIRST_SPARE_ID, FEW_IDS, SPARE_IDS = 0x60000000, 50_000, 10_000
"""The first user id that nobody has: usually, and in a container with only 65,536 ids; and how many ids are used."""

SCRATCH = ("/jail/tmp", "/jail/dev/shm")

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x50000 | errno.EPERM
CALLS = {"x86_64": (0xC000003E, 41, 29), "aarch64": (0xC00000B7, 198, 194)}
"""By machine: its number in a filter of system calls, and the numbers of `socket` and `shmget`."""
IO_URING_SETUP, X32_CALLS = 425, 0x40000000
FAMILIES = (1, 2, 10, 16)
"""The families of sockets that namespaces separate: Unix, IPv4, IPv6, netlink."""

libc = ctypes.CDLL(None, use_errno=True)


class Options:
    """The arguments: the control socket, the file of the program, 1 for namespaces or 0, CPU seconds, bytes of memory,
    of a file and of the private folders, processes, and the visible paths. `proc` is the folder in which the watcher
    finds the processes."""

    def __init__(self, arguments: list[str]) -> None:
        numbers = map(int, arguments[:8])
        self.control, self.source, namespaces, self.cpu_s, self.memory, self.file, self.disk, self.processes = numbers
        self.namespaces = bool(namespaces)
        self.proc = "/jail/proc" if namespaces else "/proc"
        self.visible = arguments[8:]
        self.user = spare_user(self.namespaces)
        # In namespaces of an ordinary user, processes are counted on their own since Linux 5.14.
        fresh = self.namespaces and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)
        self.kernel_counts = self.user is not None or fresh


def main() -> None:
    options = Options(sys.argv[1:])
    try:
        if options.namespaces:
            enter_namespaces(options.user)
            watcher = os.fork()
            if watcher:
                os.waitpid(watcher, 0)
                os._exit(0)
            build_root(options)
        else:
            with suppress(AttributeError):
                libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        program = watch(options)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        os.write(options.control, f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)
    run(program)


# Who the program is


def spare_user(namespaces: bool) -> "int | None":
    """A user id that nobody has, where this process is root and may take it. Each call takes another id, so that the
    kernel counts its processes apart. Without namespaces the user must be able to read this Python."""
    if os.geteuid() != 0:
        return None
    for first in (FIRST_SPARE_ID, FEW_IDS):
        user = first + os.getpid() % SPARE_IDS
        try:
            os.setegid(user)
            os.seteuid(user)
            if namespaces or all(
                os.access(path, mode, effective_ids=True)
                for path, mode in ((os.__file__, os.R_OK), (sys.executable, os.X_OK))
            ):
                return user
        except OSError:
            # The namespace of this process does not map the id.
            continue
        finally:
            os.seteuid(0)
            os.setegid(0)
    return None


# Namespaces


def enter_namespaces(user: "int | None") -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if user is not None:
        call("unshare", flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | CLONE_NEWUSER)
    # Not as user 0: root of a namespace would get its rights back whenever it starts a program.
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"1000 {uid} 1")
    write("/proc/self/gid_map", f"1000 {gid} 1")


def build_root(options: Options) -> None:
    """Build /jail in a new root: the visible paths, read-only, and private, bounded folders. Nothing else is there.

    The jail becomes the program's root, and it is not the root of the mount namespace. The kernel refuses such a
    process a user namespace, in which it could mount anything.
    """
    os.umask(0o022)
    real = {path: os.path.realpath(path) for path in options.visible if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in options.visible if os.path.islink(path)}
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/jail")
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for folder in SCRATCH:
        os.makedirs(folder)
        size = f"size={options.disk},nr_inodes={max(64, options.disk >> 12)},mode=1777"
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
    """Make every mount in the jail read-only: a flag holds for one mount only. The other flags of a mount must stay."""
    with open(mounts, "rb") as lines:
        targets = [unescape(line.split()[4]) for line in lines]
    for target in targets:
        if target.startswith("/jail/") and target not in SCRATCH:
            now = os.statvfs(target).f_flag
            same = now & SAME_FLAGS | (MS_RELATIME if now & ST_RELATIME else 0)
            mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | same)


def unescape(path: bytes) -> str:
    r"""A path as /proc writes it, with \040 for a space."""
    first, *others = path.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in others))


def mount_proc(folder: str) -> None:
    """Mount the processes of the namespace, without the machine's settings where the kernel can leave them out."""
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


def watch(options: Options) -> str:
    """Start the program, wait for it, and end with all its children. Returns only in the program's process: the source
    of the program."""
    source = os.pread(options.source, os.fstat(options.source).st_size, 0).decode()
    os.close(options.source)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The kernel protects the first process of a namespace only from signals for which it has no handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    problem, tell = os.pipe()
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (options.control, woken, wake, problem):
            os.close(fd)
        confine(options, tell)
        return source
    os.close(tell)
    status = wait(program, woken, options)
    if not options.namespaces:
        kill_descendants()
    failed = b""
    os.set_blocking(problem, False)
    with suppress(BlockingIOError):
        failed = os.read(problem, 4096)
    # The caller may have gone.
    with suppress(OSError):
        os.write(options.control, b"failed " + failed if failed else b"status %d" % status)
    os._exit(0)


def wait(program: int, woken: int, options: Options) -> int:
    """The status of `program`, as a shell gives it; that of a kill where the caller has gone, or where the processes
    are too many or take too much memory together."""
    poll = select.poll()
    poll.register(options.control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        status = reap(program)
        if status is not None:
            return status
        ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
        if options.control in ready or takes_too_much(options):
            return 128 + signal.SIGKILL
        if woken in ready:
            os.read(woken, 4096)


def takes_too_much(options: Options) -> bool:
    found = descendants(options.proc)
    if not options.kernel_counts and len(found) > options.processes:
        return True
    return sum(memory(f"{options.proc}/{pid}") for pid in found) > options.memory


def memory(process: str) -> int:
    """Bytes of memory. Where the kernel allows a look, shared memory is divided among the processes that share it."""
    with suppress(OSError, ValueError):
        with suppress(PermissionError), open(f"{process}/smaps_rollup", "rb") as rollup:
            return int(rollup.read().partition(b"\nPss:")[2].split()[0]) << 10
        with open(f"{process}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return 0


def reap(program: int) -> "int | None":
    """Reap all children that have ended; the status of `program` if it is one of them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break
    return None


def kill_descendants() -> None:
    """Kill until none is left: some may start others meanwhile."""
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


# The program


def confine(options: Options, tell: int) -> None:
    """Give up all rights that the program must not have. A failure ends the process, with the reason in `tell`."""
    try:
        if options.namespaces:
            os.chroot("/jail")
            os.chdir("/tmp")
        os.setsid()
        if options.user is not None:
            if not options.namespaces:
                os.chown(".", options.user, options.user)
            os.setgroups([])
            os.setresgid(options.user, options.user, options.user)
            os.setresuid(options.user, options.user, options.user)
        with suppress(AttributeError):
            drop_rights()
        set_limits(options)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        os.write(tell, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(1)
    os.close(tell)


def drop_rights() -> None:
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refuse_calls()


def refuse_calls() -> None:
    """Refuse calls that neither namespaces nor limits hold: sockets to the host of a virtual machine (vsock), io_uring,
    which makes sockets that no filter sees, and System V shared memory, which outlives all processes."""
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


def set_limits(options: Options) -> None:
    limits = [
        (resource.RLIMIT_CPU, options.cpu_s),
        (resource.RLIMIT_AS, options.memory),
        (resource.RLIMIT_FSIZE, options.file),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ]
    if options.kernel_counts:
        limits.append((resource.RLIMIT_NPROC, options.processes))
    for kind, value in limits:
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # macOS knows some of them by name only.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def run(source: str) -> None:
    """Run as `python -I -` does: a failure is printed without the frames of this script."""
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
