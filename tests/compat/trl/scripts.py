"""Translations of scripts, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.compat.trl.command import translated
from asyncrl.compat.trl.source import read_trl
from asyncrl.config.compose import read
from asyncrl.config.schema import TrainConfig

HERE = Path(__file__).parent


def loaded(name: str, tmp_path: Path, words: Sequence[str] = ()) -> tuple[TrainConfig, list[str]]:
    """The translation of an example as asyncrl's own configuration, and its report."""
    file = tmp_path / "mine.yaml"
    text, report = translated(HERE / name, list(words), file)
    assert not has(report, "Fix before you start a run")
    file.write_text(text)
    return read([f"experiment={file}"], names_missing_data=False), report


def has(report: Sequence[str], *parts: str) -> bool:
    """True if one line has all of these parts."""
    return any(all(part in line for part in parts) for line in report)


def of_script(tmp_path: Path, text: str) -> dict[str, Any]:
    """The keys that a script with this text sets."""
    (tmp_path / "script.py").write_text(text)
    return read_trl(tmp_path / "script.py", [])[0]
