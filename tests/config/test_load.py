"""A role reads its command line: refusals end it with status 2 and without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import GENEROUS_S


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["data.train=nowhere.parquet", "learner.stepz=1"],
            [
                "asyncrl: learner.stepz=1: there is no such key; did you mean learner.steps?",
                "asyncrl: model.path: set it on the command line (model.path=VALUE) or in the file of an experiment",
                "asyncrl: data.train=nowhere.parquet: there is no such file; see docs/quick_start.md for data",
            ],
        ),
        (["--multirun"], ["asyncrl: unrecognized arguments: --multirun; see asyncrl replay --help"]),
    ],
)
def test_a_wrong_command_line_ends_with_a_line_for_each_mistake(arguments: list[str], lines: list[str]) -> None:
    result = run("asyncrl.replay", *arguments)
    assert (result.returncode, result.stderr.splitlines()) == (2, lines)


def test_cfg_shows_what_would_run() -> None:
    shown = run("asyncrl.replay", "--cfg", "job", "learner.steps=7")
    assert (shown.returncode, "steps: 7" in shown.stdout) == (0, True)
