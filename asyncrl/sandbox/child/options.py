"""Reads the launcher's options, and finds user ids with which the program may run."""

import os
import sys

FOLDER_PREFIX = "asyncrl-python-"
"""The beginning of the name of a program's own folder, which a program without namespaces has."""
SPARE_IDS = range(0x60000000, 0x60000000 + (1 << 22)), range(50_000, 65_000)
"""Two ranges of user ids that no account has. The second is for containers that map only 65,536 ids."""


class Options:
    """The options in the arguments of the launcher, in this order.

    - The control socket, the file of the program, and 1 or 0: with or without namespaces.
    - Limits: CPU seconds; bytes of memory, of a file and of each private folder; processes.
    - The visible paths.

    `proc` is the mount of procfs in which the watcher finds the processes. `launcher` is the process id of the
    launcher. `kernel_counts` is true if the kernel counts the program's processes separately from those of others.
    """

    def __init__(self, arguments: list[str]) -> None:
        numbers = map(int, arguments[:8])
        self.control, self.source, namespaces, self.cpu_s, self.memory, self.file, self.disk, self.processes = numbers
        self.namespaces = bool(namespaces)
        self.proc = "/jail/proc" if namespaces else "/proc"
        self.visible = arguments[8:]
        self.users = spare_users(self.namespaces)
        self.launcher = os.getpid()
        # Since Linux 5.14 processes are counted for each user namespace.
        fresh = self.namespaces and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)
        self.kernel_counts = self.users is not None or fresh


def spare_users(namespaces: bool) -> "range | None":
    """Return user ids that no account has, for `rights.take_user`, or None if this process is not root or cannot use
    such ids.

    Without namespaces, such a user must be able to read the files of this Python.
    """
    if os.geteuid() != 0:
        return None
    for users in SPARE_IDS:
        try:
            os.setegid(users[-1])
            os.seteuid(users[-1])
            if namespaces or all(
                os.access(path, mode, effective_ids=True)
                for path, mode in ((os.__file__, os.R_OK), (sys.executable, os.X_OK))
            ):
                return users
        except OSError:
            # This id does not exist in the user namespace of this process.
            continue
        finally:
            os.seteuid(0)
            os.setegid(0)
    return None
