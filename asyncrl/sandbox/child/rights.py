"""Drops all rights of the program's process that the program must not have."""

import ctypes
import errno
import os
import resource
import struct
import sys
from contextlib import suppress

from asyncrl.sandbox.child.options import Options
from asyncrl.sandbox.child.system import call

TRIES = 100
"""The number of user ids that are tried before the start of a program fails."""

PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x50000 | errno.EPERM
CALLS = {"x86_64": (0xC000003E, 41, 29), "aarch64": (0xC00000B7, 198, 194)}
"""The numbers that a filter of system calls needs, for each type of machine: the number of the type itself, and those
of the calls `socket` and `shmget`."""
IO_URING_SETUP, X32_CALLS = 425, 0x40000000
FAMILIES = (1, 2, 10, 16)
"""The families of sockets that namespaces separate: Unix, IPv4, IPv6, netlink."""


def confine(options: Options, failure: int) -> None:
    """Drop all rights that the program must not have. If this fails, write the reason to `failure` and exit."""
    try:
        if options.namespaces:
            os.chroot("/jail")
            os.chdir("/tmp")
        os.setsid()
        if options.users is not None:
            user = take_user(options.users, options.launcher)
            if not options.namespaces:
                os.chown(".", user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        with suppress(AttributeError):
            drop_rights()
        set_limits(options)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(1)
    os.close(failure)


def take_user(users: range, launcher: int) -> int:
    """Take a real user id that no other process has, and keep the rights of root.

    The kernel counts the processes of a user on the whole machine. So programs that run as the same user would share
    one limit, even in different containers.
    """
    # Each launcher begins the search at another id: in one PID namespace, launchers have different process ids.
    user = users[launcher % len(users)]
    for _ in range(TRIES):
        # The id may not exist in the user namespace of this process.
        with suppress(OSError):
            os.setresuid(user, user, 0)
            if is_alone():
                os.setresuid(user, 0, 0)
                return user
        os.setresuid(0, 0, 0)
        user = users[int.from_bytes(os.urandom(8), "little") % len(users)]
    raise OSError(errno.EAGAIN, f"none of {TRIES} user ids is free, or this machine has too many processes")


def is_alone() -> bool:
    """True if this process is the only one of its user. The test is a fork under a limit of two processes: the fork
    fails if the user has another process."""
    resource.setrlimit(resource.RLIMIT_NPROC, (2, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        child = os.fork()
    except BlockingIOError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def drop_rights() -> None:
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refuse_calls()


def refuse_calls() -> None:
    """Refuse system calls that neither namespaces nor limits confine.

    These are sockets to the host of a virtual machine (vsock); io_uring, which can open sockets that a filter of system
    calls does not see; and System V shared memory, which outlives all processes.
    """
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
        # Some kernels have no filters of system calls.
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
        # On macOS some of these limits cannot be set.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
