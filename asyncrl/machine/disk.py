"""Writing to a disk that may be full: what must be written waits for room, and a log never fails its process."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError

from asyncrl.errors import StoppedError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOOK_S = 2.0

logger = logging.getLogger(__name__)


def when_there_is_room(write: Callable[[], T], stop: threading.Event, what: str, look_s: float = LOOK_S) -> T:
    """What `write` returns, which is called again every `look_s` seconds for as long as the disk is full.

    Raises StoppedError: `stop` was set meanwhile; and whatever else `write` raises.
    """
    waited = False
    while True:
        try:
            written = write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not waited:
                logger.error("the disk is full: %s waits for room (%s)", what, error)
            waited = True
        else:
            if waited:
                logger.warning("%s is written: there is room again", what)
            return written
        if stop.wait(look_s):
            raise StoppedError(f"stopped while {what} waited for room on the disk")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError."""
    from safetensors.torch import save_file

    with as_os_errors():
        save_file(dict(tensors), path, dict(metadata) if metadata else None)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """What safetensors reports of the operating system in its own way, raised as the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number)) from error
        raise


class LossyText(io.TextIOBase):
    """Text to the open file `descriptor`, without a buffer. What cannot be written is lost, and the next text that can
    be says how often that was."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._raw = io.FileIO(descriptor, "w", closefd=False)
        self.lost = 0

    def write(self, text: str) -> int:
        note = f"({self.lost} writes to this log were lost)\n" if self.lost else ""
        try:
            self._raw.write((note + text).encode(errors="backslashreplace"))
            self.lost = 0
        except OSError:
            self.lost += 1
        return len(text)

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

    def writable(self) -> bool:
        return True
