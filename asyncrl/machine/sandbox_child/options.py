"""What the caller asks for, and as which user the program runs."""

import os
import sys

FIRST_SPARE_ID, FEW_IDS, SPARE_IDS = 0x60000000, 50_000, 10_000
"""The first user id that nobody has: usually, and in a container with only 65,536 ids; and how many ids are used."""


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
