"""The result of benchmarks.gpu_loop: a file that is written after each run, and that a later call can extend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, DataError
from benchmarks.record import write_result

COLOCATED = "colocated"
OLD_GROUPS = "old_groups"
"""The field of a row with the treatment of groups that become too old. Rows in which they are evicted lack it."""
KEYS = {"settings", "rows", "failed", "sglang", "bare_tokens_per_s"}


def label(row: Mapping[str, Any]) -> str:
    """The name of a row: its age bound, and the treatment of old groups unless they are evicted. COLOCATED: synchronous
    training with turns on the same GPUs."""
    if row.get(COLOCATED):
        return COLOCATED
    return f"{row['max_lag']} {row[OLD_GROUPS]}" if OLD_GROUPS in row else str(row["max_lag"])


def in_order(row: Mapping[str, Any]) -> tuple[int, bool]:
    """The place of a row: the colocated one first, then by age bounds."""
    return row["max_lag"], not row.get(COLOCATED)


def read_record(path: Path) -> dict[str, Any]:
    """Machine, date and result. Raises DataError: the file does not exist, or is no result of benchmarks.gpu_loop."""
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError:
        record = None
    result = record.get("result") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(result, dict) or not result.keys() >= KEYS:
        raise DataError(f"{path}: benchmarks.gpu_loop did not write it")
    return record


class Result:
    """The measurements so far. `resume` keeps the content of the file.

    Raises ConfigError: the file was measured on another device, or with other settings.
    """

    def __init__(self, folder: Path, name: str, device: str, settings: Mapping[str, Any], resume: bool) -> None:
        self.name = name
        self.content: dict[str, Any] = {"settings": dict(settings), "rows": []}
        self._folder, self._device = folder, device
        self._file = folder / f"{name}.json"
        if resume and self._file.exists():
            record = _resumed(self._file)
            earlier = record["result"]
            self._refuse({"device": record["machine"], **earlier["settings"]}, {"device": device, **settings})
            self.content = earlier
        self.content["failed"] = {}

    @property
    def labels(self) -> list[str]:
        """The names of the measured rows."""
        return [label(row) for row in self.content["rows"]]

    def served_by(self, version: str | None) -> None:
        """Record the version of SGLang; None: the embedded engine. Raises ConfigError: the file was measured with
        another one."""
        self._refuse({"SGLang": self.content.get("sglang", version)}, {"SGLang": version})
        self.content["sglang"] = version

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"] = sorted([*self.content["rows"], row], key=in_order)

    def write(self) -> Path:
        return write_result(self.name, self.content, self._device, self._folder)

    def _refuse(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Raise ConfigError for differences that make figures incomparable."""
        names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
        if names:
            differ = ", ".join(f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names)
            raise ConfigError(
                f"--resume: {self._file}: {differ}; use the same settings, give another --name, or leave out "
                "--resume, so that everything is measured again and the file is replaced"
            )


def _resumed(file: Path) -> dict[str, Any]:
    try:
        return read_record(file)
    except DataError as error:
        raise ConfigError(
            f"--resume: {error}; give another --name, or leave out --resume to replace the file"
        ) from error
