"""The present work of a process: the phase of its main thread, and long work with the remaining time.

The process writes these to the file ROLE.doing, next to its heartbeat, for views of the run. Nothing else depends on
this file.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.machine.files import NO_ROOM, overwrite, partial_name

SUFFIX = ".doing"


class Doing(msgspec.Struct, frozen=True):
    """The present work of a process. Times are in seconds since 1970.

    - `phase`: the phase of the main thread
    - `since`: the time at which the phase began
    - `work`: long work, such as "loading the model: 12 of 30 GB, 20 s left", or empty
    - `silent`: a part of the process that sends no heartbeats, such as a rank of the learner, or empty
    - `silent_since`: the time of the last heartbeat of that part
    """

    phase: str
    since: float
    work: str = ""
    silent: str = ""
    silent_since: float = 0.0

    def write(self, heartbeat: Path) -> None:
        """Write this next to the file of a heartbeat. A reader sees either the whole new content or the old one. On a
        full disk the old content is written over, and a reader may find none for a moment. Raises OSError."""
        path, content = _beside(heartbeat), msgspec.json.encode(self)
        partial = partial_name(path)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            overwrite(path, content)  # The old content has room already.


def read_doing(heartbeat: Path) -> Doing | None:
    """Return the work of the process with this heartbeat, or None if the process has written none."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_beside(heartbeat).read_bytes(), type=Doing)
    return None


def forget_doing(heartbeat: Path) -> None:
    """Remove the file that an earlier process with this heartbeat wrote. Raises OSError."""
    _beside(heartbeat).unlink(missing_ok=True)


def _beside(heartbeat: Path) -> Path:
    return heartbeat.with_name(heartbeat.name + SUFFIX)
