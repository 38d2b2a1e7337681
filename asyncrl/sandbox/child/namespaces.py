"""Makes namespaces for the program, and a root folder with only the files that the program may see."""

import ctypes
import os

from asyncrl.sandbox.child.options import Options
from asyncrl.sandbox.child.system import call

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MS_RELATIME, ST_RELATIME, SAME_FLAGS = 1 << 21, 4096, 0xC0F
MNT_DETACH = 2
SCRATCH = ("/jail/tmp", "/jail/dev/shm")


def enter_namespaces(is_root: bool) -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if is_root:
        call("unshare", flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | CLONE_NEWUSER)
    # The program does not run as user 0: the root user of a namespace regains its rights whenever it executes a
    # program.
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"1000 {uid} 1")
    write("/proc/self/gid_map", f"1000 {gid} 1")


def build_root(options: Options) -> None:
    """Build /jail in a new root. It has only the visible paths, read-only, and private folders of bounded size.

    The jail becomes the program's root, but is not the root of the mount namespace. So the kernel does not let the
    program create a user namespace, in which it could mount anything.
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
    """Make every mount in the jail read-only, except for the private folders. The flag applies to a single mount, so
    the mounts are changed one by one. Their other flags are kept."""
    with open(mounts, "rb") as lines:
        targets = [unescape(line.split()[4]) for line in lines]
    for target in targets:
        if target.startswith("/jail/") and target not in SCRATCH:
            now = os.statvfs(target).f_flag
            same = now & SAME_FLAGS | (MS_RELATIME if now & ST_RELATIME else 0)
            mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | same)


def unescape(path: bytes) -> str:
    r"""Decode a path of mountinfo, which has \040 for a space."""
    first, *others = path.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in others))


def mount_proc(folder: str) -> None:
    """Mount procfs for the namespace. If the kernel supports it, this procfs shows only the namespace's processes."""
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


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
