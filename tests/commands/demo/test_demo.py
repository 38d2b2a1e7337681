"""The command around the demo's run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from asyncrl.commands.demo.__main__ import main, preparation_threads
from asyncrl.commands.demo.prepare import CACHE, SEED, Effort, make_policy, prepared_files
from asyncrl.commands.demo.summary import (
    SHOWN_FILE,
    before_and_after,
    most_improved,
    reward_text,
    try_next,
    written_once,
)
from asyncrl.config import commands
from asyncrl.errors import ConfigError
from asyncrl.observe.kept.episode import HELD_OUT, KeptEpisode, KeptRow, row_of
from asyncrl.observe.kept.format import FOLDER
from asyncrl.observe.kept.index import INDEX
from asyncrl.runs.run import Run
from asyncrl.types import Finish, Labels, Role, Trajectory, Turn

LITTLE = Effort(warm_start=1, step_scorer=1, judged=1)


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_a_small_machine_prepares_the_demo_with_one_thread_and_a_large_one_with_few(cpus: int, threads: int) -> None:
    assert preparation_threads(cpus) == threads


@pytest.mark.parametrize("folder", ["runs/demo", "/scratch/somebody/experiments/of/a/whole/year/demo"])
def test_what_to_try_next_stands_in_a_column_however_long_the_folder_is(folder: str) -> None:
    lines = try_next(Path(folder)).splitlines()[2:]
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines}) == 1


def test_what_to_try_next_can_be_pasted_with_and_without_an_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "environment" / "bin" / "asyncrl"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert commands.runnable(own) == str(own)
    monkeypatch.chdir(tmp_path)
    assert commands.runnable(own) == "environment/bin/asyncrl"
    monkeypatch.setenv("PATH", str(own.parent))
    assert commands.runnable(own) == "asyncrl"
    assert commands.runnable(tmp_path / "missing") == "asyncrl", "Python has no such file next to it"


def episode(name: str, reward: float, outcome: float, steps: list[float]) -> KeptEpisode:
    tokens = np.zeros(2, np.int32)
    trajectory = Trajectory(
        id=name,
        task_id="asyncrl/arithmetic/eval/0",
        group_id=name,
        member=0,
        tokens=tokens,
        logprobs=np.zeros(2, np.float32),
        version_runs=np.array([[0, -1], [1, 0]], np.int32),
        turns=(Turn(0, 1, Role.PROMPT), Turn(1, 2, Role.ASSISTANT, "stop")),
        steps=(),
        finish=Finish.COMPLETED,
    )
    ends = np.arange(1, len(steps) + 1, dtype=np.int32)
    labels = Labels(name, reward, outcome, "test", np.array(steps, np.float32), ends)
    arrays = (np.zeros(2, np.float32),) * 3
    return KeptEpisode(row_of(0, 0, trajectory, labels, None, [HELD_OUT]), trajectory, labels, None, *arrays)


def test_the_reward_is_shown_as_the_sum_of_its_parts_where_these_are_all_of_it() -> None:
    right = episode("a", 1.25, 1.0, [0.25, 0.75])
    assert reward_text(right, 0.5) == "reward 1.25 = 1 (right answer) + 0.5 x 0.50 (scores of the steps)"
    wrong = episode("a", 0.25, 0.0, [0.25, 0.75])
    assert reward_text(wrong, 0.5) == "reward 0.25 = 0 (wrong answer) + 0.5 x 0.50 (scores of the steps)"
    assert reward_text(episode("a", 0.75, 1.0, [0.25, 0.75]), 0.5) == "reward 0.75 (outcome 1.00)"
    assert reward_text(episode("a", 1.0, 1.0, []), 0.5) == "reward 1.00 (outcome 1.00)"


def test_the_task_with_the_largest_gain_is_shown() -> None:
    def row(step: int, task: str, reward: float, flags: tuple[str, ...] = (HELD_OUT,)) -> KeptRow:
        return KeptRow(step, "", "", 0, task, "", reward, 0.0, 1, 1, 1, 1, (), 0, "", 0, 0, flags)

    first = [row(0, "a", 0.25), row(0, "b", 1.0), row(0, "c", 0.5, flags=())]
    last = [row(8, "a", 1.25), row(8, "b", 1.5), row(8, "c", 9.0, flags=())]
    assert most_improved([*first, *last]) == (first[0], last[0])
    assert most_improved(first) is None, "there was only one evaluation"
    assert most_improved([]) is None
    assert most_improved([*first, row(8, "d", 1.0)]) is None, "no task in common"


def test_a_run_without_held_out_episodes_ends_without_them(tmp_path: Path) -> None:
    assert before_and_after(Run(tmp_path), 0.5) == ""


@pytest.mark.slow
def test_the_demos_policy_alone_is_the_one_that_the_demo_trains(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_policy(tmp_path / "one", tmp_path / CACHE, 3, lambda _: None, LITTLE)
    make_policy(tmp_path / "two", tmp_path / CACHE, 3, lambda _: None, LITTLE)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "one" / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="one exists: name a new folder"):
        make_policy(tmp_path / "one", tmp_path / CACHE, 3, lambda _: None, LITTLE)


def test_the_help_of_the_demo_has_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["asyncrl demo"])
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "--model-only DIR" in shown


@pytest.mark.parametrize("option", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_the_demo_shows_its_own_configuration_and_prepares_nothing(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*option, "learner.steps=3"]) == 0
    shown = yaml.safe_load(capfd.readouterr().out)
    files = prepared_files(CACHE, SEED)
    assert (shown["run"]["name"], shown["learner"]["steps"], shown["learner"]["batch_size"]) == ("demo", 3, 64)
    assert (shown["model"]["path"], shown["data"]["train"]) == (str(files.model), [str(files.train)])
    assert not (tmp_path / CACHE).exists()


def test_a_wrong_word_of_the_demo_is_refused_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--jsn"]) == 2
    assert "--jsn" in capfd.readouterr().err
    assert not (tmp_path / CACHE).exists()


def test_the_end_of_the_demo_is_made_again_only_if_the_run_has_trained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def write_report(name: str) -> Path:
        made.append(name)
        return Path(name) / f"report{len(made)}.html"

    monkeypatch.setattr("asyncrl.runs.report.page.write_report", write_report)
    trained = tmp_path / "summary.json"
    trained.write_text("{}")
    os.utime(trained, (1000, 1000))
    text = written_once(tmp_path, 0.5)
    assert text == f"  report             {tmp_path}/report1.html\n"
    assert written_once(tmp_path, 0.5) == text
    assert len(made) == 1
    os.utime(trained, ns=(shown := (tmp_path / SHOWN_FILE).stat().st_mtime_ns + 1, shown))
    assert "report2.html" in written_once(tmp_path, 0.5)


def test_the_end_of_the_demo_is_made_again_after_the_kept_episodes_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.runs.report.page.write_report", lambda name: Path(name) / "report.html")
    (tmp_path / "summary.json").write_text("{}")
    os.utime(tmp_path / "summary.json", (1000, 1000))
    index = tmp_path / FOLDER / INDEX
    index.parent.mkdir()
    index.write_text("damaged\n")
    assert "The kept episodes cannot be read: " in written_once(tmp_path, 0.5)
    index.unlink()
    assert written_once(tmp_path, 0.5) == f"  report             {tmp_path}/report.html\n"


@pytest.mark.slow
def test_a_finished_demo_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import asyncrl.commands.demo.__main__; from asyncrl.machine.process import set_thread_variables; "
        "set_thread_variables(2); print({'torch', 'transformers', 'jinja2'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
