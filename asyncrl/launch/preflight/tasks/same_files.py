"""Refuses a file of tasks that has changed since the run's episodes began.

The checksums of the files are in the run's folder. A file whose size and time are the same is not read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from asyncrl.data.opening import RunTasks
from asyncrl.errors import ConfigError, DataError
from asyncrl.machine.files import write_whole

NAME = "files.json"
AT_ONCE = 1 << 20


class FileRecord(msgspec.Struct, frozen=True):
    """The size of a file in bytes, the time of its last change in nanoseconds, and its checksum."""

    size: int
    changed_ns: int
    checksum: str


def check_same_files(run_dir: Path, files: Iterable[Path], begun: bool) -> None:
    """Record the files of a run's tasks. If the run has `begun`, its episodes name rows of the files, and so the files
    must be the recorded ones.

    Raises ConfigError, which names the files that have changed; DataError: a file cannot be read.
    """
    path = run_dir / "tasks" / NAME
    before = _read(path)
    now = {str(file): _record(file, before.get(str(file))) for file in files}
    changed = [name for name, record in now.items() if begun and before.get(name, record).checksum != record.checksum]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} has changed since the run began; the run's episodes refer to tasks by their row: "
            "restore the file, or choose another run.name"
        )
    if now != before:
        write_whole(path, json.dumps(msgspec.to_builtins(now), indent=1))


def task_files(tasks: RunTasks) -> Iterator[Path]:
    """Yield the files of tasks that roles read. Files that `asyncrl train` has made from sources are left out: they
    never change."""
    from asyncrl.data.tables import find_files

    for sources in (tasks.data.train, tasks.data.eval or []):
        if sources and tasks.made_file(sources) is None:
            for path in (file for source in sources for file in find_files(source)):
                yield from sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _read(path: Path) -> dict[str, FileRecord]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FileRecord])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; restore it, or remove it to accept the files as they are now"
        ) from (error)


def _record(path: Path, before: FileRecord | None) -> FileRecord:
    try:
        about = path.stat()
        if before is not None and (before.size, before.changed_ns) == (about.st_size, about.st_mtime_ns):
            return before
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while piece := file.read(AT_ONCE):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return FileRecord(about.st_size, about.st_mtime_ns, digest.hexdigest())
