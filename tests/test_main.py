"""The `asyncrl` command: help comes at once, and an unknown command is refused with the nearest one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import asyncrl
from asyncrl.config.commands import COMMANDS
from tests.helpers import GENEROUS_S


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", *arguments], capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )


def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "--help"], "algorithm   cispo, dapo"),
        (["learner", "--help", "replay.filter"], "replay.filter.min_reward: a number or null (default null)"),
        (["keys", "--help"], "--out"),
        (["--version"], f"asyncrl {asyncrl.__version__}"),
    ],
)
def test_help_and_version(arguments: list[str], text: str) -> None:
    shown = run(*arguments)
    assert (shown.returncode, text in shown.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "asyncrl: there is no command 'trian'; did you mean train?\n"),
        (["actor", "--help", "lerner"], "asyncrl: lerner: there is no such section; did you mean learner?\n"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
