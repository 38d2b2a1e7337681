"""The result of benchmarks.gpu_loop: a file that is written after each age bound, and that a later call may go on
with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, DataError
from benchmarks.record import write_result

KEYS = {"settings", "rows", "failed", "sglang", "bare_tokens_per_s"}


def read_record(path: Path) -> dict[str, Any]:
    """Machine, date and result. Raises DataError: there is no such file, or it is no result of benchmarks.gpu_loop."""
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
    """What was measured so far. `resume` keeps what the file has.

    Raises ConfigError: that was measured on another device, or with other settings.
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
    def lags(self) -> list[int]:
        return [row["max_lag"] for row in self.content["rows"]]

    def served_by(self, version: str) -> None:
        """Note the version of SGLang. Raises ConfigError: what the file has was measured over another one."""
        self._refuse({"SGLang": self.content.get("sglang", version)}, {"SGLang": version})
        self.content["sglang"] = version

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"] = sorted([*self.content["rows"], row], key=lambda each: each["max_lag"])

    def write(self) -> Path:
        return write_result(self.name, self.content, self._device, self._folder)

    def _refuse(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Figures where any of this differs cannot be compared."""
        names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
        if names:
            differ = ", ".join(f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names)
            raise ConfigError(
                f"--resume: {self._file}: {differ}; repeat what it was measured with, give another --name, or leave "
                "out --resume, which measures all anew and replaces it"
            )


def _resumed(file: Path) -> dict[str, Any]:
    try:
        return read_record(file)
    except DataError as error:
        raise ConfigError(
            f"--resume: {error}; give another --name, or leave out --resume, which replaces it"
        ) from error
