"""Runs of a study that end, fail, are cut short and go on, with a stand-in for `asyncrl train`."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands.demo.ladder.prepare import PreparedRung
from asyncrl.launch.ownership import exclusively
from asyncrl.machine.child import start_child
from asyncrl.machine.owner import Owner, owner_of
from asyncrl.observe.sinks import metrics_file
from benchmarks.studies import command, process_rewards
from benchmarks.studies.results import Results
from benchmarks.studies.runner import Runner
from benchmarks.studies.search import best_rate
from benchmarks.studies.study import LR, Run, Search
from tests.benchmarks.studies.stand_in import FAILS, KILLED, STOPPED, WAITS
from tests.benchmarks.studies.support import STUDY

pytestmark = pytest.mark.slow

CELL = {"size": "small", "colour": "red"}
STAND_IN = (sys.executable, "-m", "tests.benchmarks.studies.stand_in")
DONE_LR = 0.1
SMALL_RED = ("size=small", "colour=red")
SIZES = {"learner.batch_size": 16, "learner.warmup_steps": 0}
SAYS_WORDS = (
    sys.executable,
    "-c",
    "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('\\n'.join(sys.argv[2:]))",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def runner(folder: Path, tmp_path: Path) -> Callable[..., Runner]:
    """A runner as if its command had just been called."""

    def make(**options: Any) -> Runner:
        prepared = PreparedRung(*[tmp_path] * 3)
        said: list[str] = []
        return Runner(folder, results(tmp_path), lambda _: prepared, said.append, command=STAND_IN, **options)

    return make


def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "toy.parquet", STUDY.factors)


def run_at(lr: float, seed: int = 0) -> Run:
    return STUDY.run(CELL, seed, lr, {})


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split()


def test_a_run_that_has_ended_is_in_the_file_and_does_not_run_again(
    runner: Callable[..., Runner], folder: Path, tmp_path: Path
) -> None:
    runs = [run_at(DONE_LR), run_at(DONE_LR, seed=1)]
    assert runner(parallel=2).run(runs)
    assert runner().run(runs)
    assert sorted(starts(folder)) == sorted(run.name for run in runs)
    rows = results(tmp_path).rows(runs[1].fingerprint)
    assert [(row["step"], row["accuracy"], row["samples"], row["seconds"]) for row in rows] == [
        (2, 0.4, 16, 4.0),
        (4, 0.8, 32, 8.0),
    ]
    assert [(row["lag_mean"], row["lag_max"]) for row in rows] == [(0.25, 1), (1.25, 3)]
    assert [row["evicted"] for row in rows] == [1, 5]
    assert [row["agreement"] for row in rows] == pytest.approx([0.95, 0.75])
    assert [row["hack_alarms"] for row in rows] == [0, 1]
    last = rows[-1]
    assert (last["size"], last["colour"], last["seed"], last["lr"]) == ("small", "red", 1, DONE_LR)
    assert (last["stage"], last["status"], last["rung"], last["parallel"]) == ("main", "done", "brackets", 2)
    assert (last["ess"], last["k3"]) == pytest.approx((0.75, 0.025))
    assert {path.name for path in folder.iterdir()} == {"starts", "gpus"}, "the folders of runs that are done are gone"


def test_a_run_that_was_cut_short_is_in_no_file_and_goes_on_where_it_was(
    runner: Callable[..., Runner], folder: Path, tmp_path: Path
) -> None:
    run = run_at(WAITS)
    evaluated = metrics_file(folder / run.name, "evaluation")
    assert not runner(is_over=evaluated.exists).run([run, run_at(DONE_LR)])
    assert results(tmp_path).rows(run.fingerprint) == []
    assert starts(folder) == [run.name], "no run starts after the deadline"
    assert runner().run([run])
    assert starts(folder) == [run.name] * 2
    assert [row["step"] for row in results(tmp_path).rows(run.fingerprint)] == [2, 4]


@pytest.mark.parametrize("lr", [STOPPED, KILLED])
def test_a_run_that_somebody_else_stops_was_cut_short_and_has_not_failed(
    lr: float, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call() -> str:
        given = [f"learner.lr={lr}", "--results", str(tmp_path), "--seeds", "1", "--only", "size=small", "colour=red"]
        command.main(STUDY, given, folder, STAND_IN, lambda _: PreparedRung(*[tmp_path] * 3))
        return capsys.readouterr().err

    assert call().splitlines()[-1] == "toy: the same command goes on"
    assert results(tmp_path).rows(run_at(lr).fingerprint) == []
    assert "all runs have ended" in call()
    assert [row["status"] for row in results(tmp_path).rows(run_at(lr).fingerprint)] == ["done"] * 2


def test_a_run_that_a_killed_command_has_left_behind_ends_before_it_goes_on(
    runner: Callable[..., Runner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks, left, owners = run_at(DONE_LR), list[None](), ExitStack(), list[Owner | None]()
    left.enter_context(exclusively(folder / run.name))

    def is_over() -> bool:
        looks.append(None)
        if len(looks) == 3:
            left.close()
        return False

    def start(*arguments: Any, **options: Any) -> Any:
        owners.append(owner_of(folder / run.name))
        return start_child(*arguments, **options)

    monkeypatch.setattr("benchmarks.studies.runner.start_child", start)
    assert runner(is_over=is_over).run([run])
    assert owners == [None]


def test_runs_divide_the_gpus_and_a_gpu_is_free_again_after_its_run(
    runner: Callable[..., Runner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = runner(gpus=[3, 5], parallel=2)
    assert shared.run([run_at(DONE_LR, seed) for seed in range(2)])
    assert sorted((folder / "gpus").read_text().split()) == ["3", "5"]
    assert shared.run([run_at(DONE_LR, 2)])
    assert (folder / "gpus").read_text().split()[2] in ("3", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner().run([run_at(DONE_LR, 3)])
    assert (folder / "gpus").read_text().split()[3:] == ["all"]


def test_a_study_with_an_experiment_trains_the_model_that_its_command_names(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = dataclasses.replace(
        STUDY, experiment="examples/reasoning_gym/rl.yaml", settings={LR: DONE_LR, **SIZES}, search=None
    )
    wanted, found = [], Results(tmp_path / "toy.parquet", STUDY.factors)
    for model in ("one", "other"):
        given = ["--model", model, "--keep", "--results", str(tmp_path), "--seeds", "1", "--only", *SMALL_RED]
        command.main(study, given, folder, (*SAYS_WORDS, str(tmp_path / model)))
        wanted.append(study.run(CELL, 0, None, {"model.path": model}).fingerprint)
        words = (tmp_path / model).read_text().splitlines()
        assert {f"model.path={model}", "experiment=examples/reasoning_gym/rl.yaml"} <= set(words)
        assert not [word for word in words if word.startswith(("data.", "actor.tools"))]
    found.read_again()
    assert [found.rows(each)[-1]["rung"] for each in wanted] == [
        f"examples/reasoning_gym/rl.yaml model.path={model}" for model in ("one", "other")
    ]
    with pytest.raises(SystemExit):
        command.main(study, given[2:], folder, STAND_IN)
    assert "the following arguments are required: --model" in capsys.readouterr().err
    for word, reason in (("rung=undo", "this study trains on examples"), ("experiment=x", "the study has its own")):
        with pytest.raises(SystemExit, match=reason):
            command.main(study, [word, *given], folder, STAND_IN)
    with pytest.raises(SystemExit, match="use --parallel 2 or more"):
        command.main(study, [*given, "--gpus", "0", "1"], folder, STAND_IN)


def test_two_commands_that_write_one_file_keep_the_runs_of_each_other(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    first, second = runner(), runner()
    runs = [run_at(DONE_LR), run_at(DONE_LR, seed=1)]
    assert first.run(runs[:1])
    assert second.run(runs[1:])
    assert all(results(tmp_path).rows(run.fingerprint) for run in runs)


def test_a_run_that_another_command_has_ended_meanwhile_does_not_start(
    runner: Callable[..., Runner], folder: Path
) -> None:
    first, second, run = runner(), runner(), run_at(DONE_LR)
    assert first.run([run])
    assert second.run([run]), "its results were read before"
    assert starts(folder) == [run.name]


def test_the_command_refuses_at_the_door_what_would_cost_hours_of_runs(tmp_path: Path, folder: Path) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            command.main(STUDY, [*words, "--results", str(tmp_path)], folder, STAND_IN)
        return str(ended.value)

    page = tmp_path / "page.md"
    assert f"{page} cannot be read" in refused("--page", str(page))
    page.write_text("<!-- study other -->\n<!-- end -->\n")
    assert "has no place for the study toy" in refused("--page", str(page))
    with command.alone(folder / "toy"):
        assert "another command runs this study" in refused()
    (tmp_path / "toy.parquet").write_bytes(b"PAR1 damaged")
    assert "restore it, or move it away" in refused("--report")
    for option in ("--seeds", "--parallel"):
        assert refused(option, "0") == "2"


def test_a_command_that_names_no_cell_is_refused(tmp_path: Path, folder: Path) -> None:
    words = ["--only", "size=large", "colour=blue", "--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="--only size=large colour=blue names no cell"):
        command.main(STUDY, words, folder, STAND_IN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["size=small", "learner.steps=80"], "put KEY=VALUE before --only"),
        (["method=pure", "from", "0"], "there are operations=2, .*'method=pure from 0'"),
    ],
)
def test_a_word_behind_only_that_is_no_level_is_refused_with_what_to_write(words: list[str], message: str) -> None:
    study = STUDY if words[0] == "size=small" else process_rewards.STUDY
    with pytest.raises(SystemExit, match=f"names no level; {message}"):
        command.main(study, ["--only", *words, "--plan"])


def test_the_help_shows_the_levels_as_a_shell_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(process_rewards.STUDY, ["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "'method=pure from 0', method=process_grpo" in told
    assert "scorer=95%, scorer=70%" in told


def test_a_report_before_any_run_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(STUDY, ["--report", "--results", str(tmp_path)])
    assert capsys.readouterr().err == "toy: no run has ended yet\n"


def test_ctrl_c_stops_the_runs_and_says_that_the_same_command_goes_on(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(_: Run) -> PreparedRung:
        os.kill(os.getpid(), signal.SIGINT)
        return PreparedRung(*[tmp_path] * 3)

    # A shell has programs that it starts in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            command.main(STUDY, [f"{LR}={WAITS}", "--results", str(tmp_path)], folder, STAND_IN, prepare)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert "toy: stopped; the same command goes on" in capsys.readouterr().err.splitlines()


def test_a_folder_that_takes_no_results_is_refused_before_the_first_run(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", Path("/proc/results")):
        with pytest.raises(SystemExit, match=f"cannot be written to {wrong}: "):
            command.main(STUDY, ["--results", str(wrong)], folder, STAND_IN)
    assert not folder.exists()


def test_a_run_that_failed_is_in_the_file_with_the_reason_and_runs_again_only_if_asked(
    runner: Callable[..., Runner], folder: Path, tmp_path: Path
) -> None:
    run = run_at(FAILS)
    for options, count in (({}, 1), ({}, 1), ({"retry_failed": True}, 2)):
        assert runner(**options).run([run])
        assert len(starts(folder)) == count
    (row,) = results(tmp_path).rows(run.fingerprint)
    assert (row["step"], row["accuracy"], row["status"]) == (None, None, "failed")
    assert row["reason"] == "the loss is not finite"


@pytest.mark.heavy
def test_a_run_that_takes_too_long_has_failed_with_what_it_had(runner: Callable[..., Runner], tmp_path: Path) -> None:
    run = run_at(WAITS)
    assert runner(limit_s=10.0).run([run])
    rows = results(tmp_path).rows(run.fingerprint)
    assert {(row["step"], row["status"], row["reason"]) for row in rows} <= {
        (2, "failed", "it took longer than 10 s"),
        (None, "failed", "it took longer than 10 s"),
    }


def test_the_best_of_the_searched_rates_is_chosen_once_all_have_ended(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    searches = [run_at(rate) for rate in (DONE_LR, FAILS, 0.2)]
    assert runner().run(searches[:2])
    assert best_rate(searches, results(tmp_path)) is None
    assert runner().run(searches[2:])
    assert best_rate(searches, results(tmp_path)) == DONE_LR, "the lowest among equals"


def test_no_rate_is_chosen_where_every_search_has_failed_and_the_command_says_so(
    runner: Callable[..., Runner], tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searches = [STUDY.run(CELL, seed, FAILS, {}) for seed in (0, 1)]
    assert runner().run(searches)
    assert best_rate(searches, results(tmp_path)) is None
    study = dataclasses.replace(STUDY, search=Search("colour", rates=(FAILS,), at={"size": "small"}))
    for words in ([], ["--report"]):
        given = [*words, "--results", str(tmp_path), "--seeds", "1", "--only", "colour=red"]
        command.main(study, given, folder, STAND_IN, lambda _: PreparedRung(*[tmp_path] * 3))
        assert "every search of red failed, so it has no learning rate" in capsys.readouterr().err
    assert len(starts(folder / "toy")) == 1, "no run of a cell starts"


def test_the_command_searches_then_runs_every_cell_and_goes_on_where_it_was(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> None:
        given = [*words, "--results", str(tmp_path), "--seeds", "2", "--only", "colour=red"]
        command.main(STUDY, given, folder, STAND_IN, lambda _: PreparedRung(*[tmp_path] * 3))

    call("--budget-s", "0")
    assert "the same command goes on" in capsys.readouterr().err
    call("--parallel", "2")
    call()
    told = capsys.readouterr()
    assert "all runs have ended" in told.err
    assert "| small | red | 1e-05 | 2 | 0 | 0 | 32 |" in told.out
    assert "| large | red | 1e-05 | 2 | 0 | 0 | 32 |" in told.out
    assert len(starts(folder / "toy")) == 2 + 2 * 2
    call("--plan")
    assert "6 runs, 2 of them to find learning rates; 6 ended; one took" in capsys.readouterr().out
    call("learner.lr=0.5", "--plan")
    assert "4 runs, 0 of them" in capsys.readouterr().out


def test_gains_are_those_over_runs_of_the_baseline_that_the_command_leaves_out(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> str:
        given = [f"learner.lr={DONE_LR}", "--results", str(tmp_path), "--seeds", "1", *words]
        command.main(STUDY, given, folder, STAND_IN, lambda _: PreparedRung(*[tmp_path] * 3))
        return capsys.readouterr().out

    blue = ("--only", "size=small", "colour=blue")
    assert "+0.00" not in call(*blue)
    call("--only", "size=small", "colour=red")
    told = call(*blue, "--report")
    assert "+0.00" in told
    assert "| red |" not in told
