"""Writes files atomically, waits while a disk is full, and removes folders that stayed empty. A process never fails
because its log cannot be written."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError

from asyncrl.errors import StoppedError
from asyncrl.masking import masked_text

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = 2.0
DISK_IS_FULL = "the disk is full: "
"""The beginning of the error that a process logs while it waits for room on a disk. Views of a run find such errors in
the run's logs."""

logger = logging.getLogger(__name__)


def partial_name(path: Path) -> Path:
    """Return the hidden name under which `path` is written before it is renamed. A later attempt uses the same name."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, content: str | Iterable[bytes], private: bool = False) -> None:
    """Write a text, or the concatenation of pieces, into a file. Its folder is made if it is missing. A reader sees the
    old content or the new one, even after a kill or a power loss. Only the owner may read a `private` file. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path)
    # A killed process may have left a partial file that other users may read.
    partial.unlink(missing_ok=True)
    with open(partial, "wb", opener=_open_private if private else None) as file:
        file.writelines([content.encode()] if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def overwrite(path: Path, content: bytes) -> None:
    """Write over the content of a file. This needs no room if the new content is not longer. Raises OSError."""
    # Never empties the file before it writes: on a full disk the file would stay empty.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
    finally:
        os.close(file)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that are missing, the innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders in order, until one is not empty or is missing."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power loss. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def when_there_is_room(write: Callable[[], T], stop: threading.Event, what: str, retry_s: float = RETRY_S) -> T:
    """Call `write`, and return its result. As long as the disk is full, try again every `retry_s` seconds.

    Raises StoppedError: `stop` was set meanwhile; and the other errors of `write`.
    """
    waited = False
    while True:
        try:
            written = write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not waited:
                logger.error("%s%s waits for room (%s)", DISK_IS_FULL, what, error)
            waited = True
        else:
            if waited:
                logger.warning("%s is written: there is room again", what)
            return written
        if stop.wait(retry_s):
            raise StoppedError(f"stopped while {what} waited for room on the disk")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError."""
    from safetensors.torch import save_file

    with as_os_errors(path):
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
        share(path)


def share(path: Path) -> None:
    """Let all users who may read the folder of a file read the file, too: safetensors lets only the owner read."""
    # Some file systems, such as object stores, cannot change modes.
    with suppress(OSError):
        path.chmod(path.stat().st_mode | path.parent.stat().st_mode & 0o044)


@contextmanager
def as_os_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' own error for a failure of the operating system into the OSError that caused it, with the name
    of the file."""
    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


class LossyText(io.TextIOBase):
    """An unbuffered text stream to the open file `descriptor`. It masks secrets. Text that cannot be written is lost.
    The next successful write also tells how many writes were lost."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._raw = io.FileIO(descriptor, "w", closefd=False)
        self.lost = 0

    def write(self, text: str) -> int:
        note = f"({self.lost} writes to this log were lost)\n" if self.lost else ""
        try:
            self._raw.write((note + masked_text(text)).encode(errors="backslashreplace"))
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
