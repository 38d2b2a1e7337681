"""Programs that stand in for the Python of SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = "packages"


def python_with(folder: Path, name: str, *files: str) -> str:
    """A Python whose packages are just these files, each of which refuses to be imported."""
    for each in files:
        file = folder / PACKAGES / each
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit('it was imported')")
    return script(folder / name, f'PYTHONPATH={folder / PACKAGES} exec {sys.executable} -S "$@"')


def script(program: Path, line: str) -> str:
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    return str(program)
