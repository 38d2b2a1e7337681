"""A role reads its command line: refusals end it with status 2 and without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import GENEROUS_S, status_of


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
def test_a_wrong_command_line_ends_with_a_line_for_each_mistake(
    arguments: list[str], lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of("replay", *arguments) == 2
    assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_plan_needs_neither_the_model_nor_the_data_and_says_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("train", "engine=sglang", "model.path=MODEL", "data.train=DATA", "cluster.gpus=8", "cluster.cpus=64")
    assert status_of(*words, "--plan", "a.b=1") == 2
    assert capfd.readouterr().err == "asyncrl: a.b=1: there is no such key\n"
    assert status_of(*words, "--plan") == 0
    planned = capfd.readouterr()
    assert (planned.err, [*tmp_path.iterdir()]) == ("", [])
    assert "set cluster.cpus" not in planned.out
    assert status_of("demo", "cluster.gpus=2", "--plan") == 0
    demo = capfd.readouterr().out
    assert "; for another machine set cluster.cpus" in demo.splitlines()[-1]
    assert (demo.split()[0], [*tmp_path.iterdir()]) == ("process", [])


def test_cfg_shows_what_would_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert status_of("replay", "--cfg", "job", "learner.steps=7") == 0
    assert "steps: 7" in capfd.readouterr().out


@pytest.mark.slow
def test_the_demo_refuses_a_wrong_word_before_it_prepares_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of("demo", "learner.steps=-1") == 2
    message = "asyncrl: learner.steps=-1: it must be a whole number in [0, inf) or null\n"
    assert (capfd.readouterr().err, [*tmp_path.iterdir()]) == (message, [])
