"""A role reads its command line: refusals end it with status 2 and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import GENEROUS_S

pytestmark = pytest.mark.slow


def run(module: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["data.train=nowhere.parquet", "learner.stepz=1"],
            [
                "asyncrl: learner.stepz=1: there is no such key; did you mean learner.steps?",
                "asyncrl: model.path: set it on the command line (model.path=VALUE) or in the file of an experiment",
                "asyncrl: data.train=nowhere.parquet: there is no such file; see docs/data.md",
            ],
        ),
        (["--multirun"], ["asyncrl: unrecognized arguments: --multirun; see asyncrl replay --help"]),
    ],
)
def test_a_wrong_command_line_ends_with_a_line_for_each_mistake(arguments: list[str], lines: list[str]) -> None:
    result = run("asyncrl.replay", *arguments)
    assert (result.returncode, result.stderr.splitlines()) == (2, lines)


def test_a_failure_of_the_disk_ends_a_role_with_a_line_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").touch()
    role = "import sys; from asyncrl.config.load import role_main; "
    role += "sys.exit(role_main(lambda _: open('gone/file'), ['model.path=m', {!r}]))"
    words = ["-c", role.format("data.train=tasks.parquet")]
    result = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )
    message = "asyncrl: [Errno 2] No such file or directory: 'gone/file'"
    assert (result.returncode, result.stderr.splitlines()) == (1, [message])


def test_a_plan_needs_neither_the_model_nor_the_data_and_says_nothing_of_them(tmp_path: Path) -> None:
    words = ("train", "engine=sglang", "model.path=MODEL", "data.train=DATA", "cluster.gpus=8", "cluster.cpus=64")
    wrong, planned = (run("asyncrl", *words, *more, folder=tmp_path) for more in (["--plan", "a.b=1"], ["--plan"]))
    assert (wrong.returncode, wrong.stderr) == (2, "asyncrl: a.b=1: there is no such key\n")
    assert (planned.returncode, planned.stderr, [*tmp_path.iterdir()]) == (0, "", [])
    assert "set cluster.cpus" not in planned.stdout
    demo = run("asyncrl", "demo", "cluster.gpus=2", "--plan", folder=tmp_path)
    assert "; for another one set cluster.cpus" in demo.stdout.splitlines()[-1]
    assert (demo.returncode, demo.stdout.split()[0], [*tmp_path.iterdir()]) == (0, "process", [])


def test_cfg_shows_what_would_run() -> None:
    shown = run("asyncrl.replay", "--cfg", "job", "learner.steps=7")
    assert (shown.returncode, "steps: 7" in shown.stdout) == (0, True)


def test_the_demo_refuses_a_wrong_word_before_it_prepares_anything(tmp_path: Path) -> None:
    result = run("asyncrl", "demo", "learner.steps=-1", folder=tmp_path)
    message = "asyncrl: learner.steps=-1: it must be a whole number in [0, inf) or null\n"
    assert (result.returncode, result.stderr, [*tmp_path.iterdir()]) == (2, message, [])
