"""The `asyncrl` command: help comes at once, and an unknown command is refused with the nearest one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import asyncrl
from asyncrl import __main__
from asyncrl.config.commands import COMMANDS, SLOW
from tests.helpers import GENEROUS_S, status_of


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", *arguments], capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )


@pytest.mark.slow
def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "--help"], "algorithm   cispo, dapo"),
        (["demo", "--help"], "usage: asyncrl demo [KEY=VALUE ...] [--plan[=N|pools]]"),
        (["status", "--help"], "usage: asyncrl status [-h]"),
        (["learner", "--help", "replay.filter"], "replay.filter.min_reward: a number or null (default null)"),
        (["keys", "--help"], "--out"),
        (["--version"], f"asyncrl {asyncrl.__version__}"),
    ],
)
def test_help_and_version(arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = status_of(*arguments)
    assert (status, text in capfd.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "asyncrl: unknown command 'trian'; did you mean train?\n"),
        (["actor", "--help", "lerner"], "asyncrl: lerner: there is no such section; did you mean learner?\n"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*arguments) == 2
    assert capfd.readouterr() == ("", message)


@pytest.mark.parametrize("name", SLOW)
def test_a_command_that_loads_for_seconds_says_so_before(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(module: str) -> None:
        raise SystemExit(f"{module} after {capfd.readouterr().err!r}")

    monkeypatch.setattr(__main__.importlib, "import_module", load)
    monkeypatch.setattr(__main__, "end_quickly", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "word"])
    assert ended.value.code == f"{COMMANDS[name].module} after 'asyncrl {name}: loading\\n'"


@pytest.mark.slow
def test_the_help_of_a_command_that_imports_torch_begins_with_the_help() -> None:
    shown = run("try", "--help")
    assert shown.stdout.startswith("usage: asyncrl try")
    assert shown.stderr in ("", "asyncrl try: loading\n")
