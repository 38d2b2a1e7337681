"""The packages that the targets of the Makefile install."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S


def commands_of(target: str, folder: Path) -> str:
    """The commands that `make` would run for a target on a machine without an environment."""
    command = ["make", "--dry-run", target, f"VENV={folder / 'environment'}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS_S, check=True)
    return ended.stdout


def test_the_demo_installs_neither_linters_nor_tests_nor_sinks(tmp_path: Path) -> None:
    shown = commands_of("demo", tmp_path)
    assert "--editable .\n" in shown
    assert "[dev]" not in shown
    assert shown.index("--editable .\n") < shown.index("asyncrl demo run.name=demo")


@pytest.mark.parametrize("target", ["check", "test-quick"])
def test_the_checks_and_the_tests_install_the_rest(target: str, tmp_path: Path) -> None:
    assert "--editable '.[dev]'" in commands_of(target, tmp_path)


def test_the_page_of_gpu_servers_names_the_torch_that_is_installed() -> None:
    (pin,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"`make install` takes PyTorch {pin}. " in (ROOT / "docs" / "gpu.md").read_text()


def test_what_is_fetched_is_announced_with_its_size_and_shown(tmp_path: Path) -> None:
    shown = commands_of("install", tmp_path)
    assert "1 of 2: torch" in shown
    assert "MB" in shown
    assert "--quiet" not in shown
