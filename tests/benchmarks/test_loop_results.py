"""The options and results of benchmarks.gpu_loop, and the report of benchmarks.loop_report."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.compose import read
from asyncrl.errors import ConfigError
from benchmarks import loop_report
from benchmarks.gpu_loop import cases, command_line, named, parse, refusal
from benchmarks.loop_report import compared, table
from benchmarks.loop_result import Result
from benchmarks.loop_runs import Case, Loop, check_python, unmeasured
from benchmarks.record import RESULTS

COMMITTED = sorted(RESULTS.glob("gpu_loop-*.json"))
SETTINGS = {"size": "tiny", "steps": 4}


def row(max_lag: int, samples_per_s: float = 2.0) -> dict[str, Any]:
    phases = {"step": 2.0, "train": 1.0, "proximal": 0.0, "wait": 1.0}
    rates = {"samples_per_s": samples_per_s, "fleet_tokens_per_s": 100.0, "fleet_to_bare": 0.8}
    shares = {"fleet_idle": 0.5, "learner_idle": 0.3, "mfu": {}, "push": {}, "token_lags": {"0": 1.0}}
    return {"max_lag": max_lag, **rates, **shares, "seconds_of_a_step": phases, "thrown_away_tokens": 0}


def result(folder: Path, device: str = "a GPU", resume: bool = True, **settings: Any) -> Result:
    return Result(folder, "gpu_loop-test", device, {**SETTINGS, **settings}, resume)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with a result that has one age bound."""
    own = result(tmp_path / "runs" / "mine")
    own.served_by("0.5.23")
    own.content["bare_tokens_per_s"] = 100.0
    own.add(row(0))
    own.write()
    return tmp_path / "runs" / "mine"


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        (2, [], "0.6B-2gpu"),
        (2, ["--servers", "1"], "0.6B-2gpu"),
        (2, ["--servers", "2"], "0.6B-2gpu-2servers"),
        (2, ["--set", "weights.mode=in_place"], "0.6B-2gpu-in_place"),
        (2, ["--servers", "2", "--set", "learner.lr=1", "weights.mode=in_place"], "0.6B-2gpu-2servers-in_place"),
        (1, ["--set", "weights.mode=in_place", "weights.mode=retract"], "0.6B-1gpu"),
        (1, ["--servers", "1", "--name", "mine"], "mine"),
        (0, ["--servers", "2"], "0.6B-0gpu-2servers"),
        (1, ["--engine", "embedded", "--workload", "short"], "0.6B-1gpu-embedded-short"),
        (2, ["--workload", "short", "--colocated"], "0.6B-2gpu-short"),
    ],
)
def test_the_name_has_servers_and_weights_mode_where_they_are_not_the_default(
    gpus: int, words: list[str], expected: str
) -> None:
    python = [] if "embedded" in words else ["--python", "python"]
    options = parse([*python, "--size", "0.6B", "--gpus", "0", *words])
    options.gpus = gpus
    assert named(options) == f"gpu_loop-{expected}"


def test_a_result_goes_where_models_and_logs_go_and_not_among_the_committed_ones() -> None:
    words = ["--python", "python", "--size", "tiny", "--gpus", "0"]
    assert parse(words).out == Path("runs/gpu_loop")
    assert parse([*words, "--dir", "/disk"]).out == Path("/disk")
    assert parse([*words, "--dir", "/disk", "--out", str(RESULTS)]).out == RESULTS


def test_the_help_has_the_default_of_each_option_that_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("default: 16", "default: 0 1 2 4 8", "default: runs/gpu_loop", "default: the folder of --dir"):
        assert default in text


def test_a_result_goes_on_where_device_settings_and_sglang_are_the_same(measured: Path) -> None:
    own = result(measured)
    own.served_by("0.5.23")
    assert (own.labels, own.content["bare_tokens_per_s"]) == (["0"], 100.0)
    assert result(measured, resume=False).labels == []


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"device": "another GPU"}, "device is 'a GPU' there and 'another GPU' here"),
        ({"steps": 8}, "steps is 4 there and 8 here"),
        ({"servers": 2}, "servers is None there and 2 here"),
    ],
)
def test_a_result_of_another_device_or_of_other_settings_is_not_resumed(
    measured: Path, changed: dict[str, Any], difference: str
) -> None:
    before = (measured / "gpu_loop-test.json").read_text()
    with pytest.raises(ConfigError, match=f"gpu_loop-test.json: {difference}; .* another --name"):
        result(measured, **changed)
    assert (measured / "gpu_loop-test.json").read_text() == before


def test_a_result_over_another_sglang_is_not_resumed(measured: Path) -> None:
    with pytest.raises(ConfigError, match=r"SGLang is '0.5.23' there and '0.5.24' here; .* another --name"):
        result(measured).served_by("0.5.24")
    result(measured, resume=False).served_by("0.5.24")


def test_a_file_that_is_no_result_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "gpu_loop-test.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"gpu_loop-test.json: benchmarks.gpu_loop did not write it"):
        result(tmp_path)


def test_a_run_without_figures_says_why_and_names_no_folder(tmp_path: Path) -> None:
    log = tmp_path / "lag-4.log"
    assert unmeasured(0, log, stopped=True) == "ended before its first step"
    assert unmeasured(1, log, stopped=True) == "ended after 1 of the 3 steps that figures need"
    assert unmeasured(1, log, stopped=False) == "failed after 1 of the 3 steps that figures need: lag-4.log says why"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_names_no_folder_of_a_machine(path: Path) -> None:
    assert not re.search(r"(?<!\w)/\w+/", path.read_text())


def test_a_program_without_sglang_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--python=\S+/none: .*"):
        check_python(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--python=/bin/true: it is no Python"):
        check_python("/bin/true")
    with pytest.raises(ConfigError, match="it has no sglang"):
        check_python(script(tmp_path / "without", "-S -I"))


def test_a_script_that_stands_in_for_a_python_is_asked_as_one_and_sglang_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise SystemExit('imported')")
    check_python(script(tmp_path / "with", "", f"export PYTHONPATH={tmp_path}; echo welcome"))


def script(path: Path, options: str, first: str = "true") -> str:
    path.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} {options} "$@"\n')
    path.chmod(0o755)
    return str(path)


COLOCATED = {"colocated": True}


def test_ratios_are_to_both_baselines_and_there_are_none_without_them() -> None:
    def ratios(*rows: dict[str, Any]) -> list[tuple[str, ...]]:
        return [tuple(line.removeprefix("| ").split(" | ")[:4]) for line in table(rows).splitlines()[2:]]

    assert ratios(row(0, 2.0), row(4, 5.0)) == [("0", "2.00", "1.00", ""), ("4", "5.00", "2.50", "")]
    assert ratios(row(1, 2.0), row(4, 5.0)) == [("1", "2.00", "", ""), ("4", "5.00", "", "")]
    assert ratios(row(0, 2.5) | COLOCATED, row(0, 2.0), row(4, 5.0)) == [
        ("colocated", "2.50", "1.25", "1.00"),
        ("0", "2.00", "1.00", "0.80"),
        ("4", "5.00", "2.50", "2.00"),
    ]


def test_the_fastest_run_is_compared_with_both_baselines_and_with_a_bare_client() -> None:
    assert compared([row(0, 2.5) | COLOCATED, row(0, 2.0), row(4, 5.0), row(8, 4.0)]) == [
        "fastest: max_lag 4, 5.00 samples/s, 2.50 times synchronous training, 2.00 times colocated synchronous "
        "training, 80% of the tokens/s of a bare client"
    ]
    assert compared([row(0, 2.0)]) == []
    assert compared([row(4, 2.0)]) == ["fastest: max_lag 4, 2.00 samples/s, 80% of the tokens/s of a bare client"]


def test_the_colocated_row_comes_first_and_is_no_other_age_bound(tmp_path: Path) -> None:
    own = result(tmp_path)
    for each in (row(4), row(0), row(0) | COLOCATED):
        own.add(each)
    assert own.labels == ["colocated", "0", "4"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--python: name a Python that has sglang, or use --engine embedded"),
        (["--engine", "embedded", "--colocated"], "--colocated with --engine embedded: it keeps its memory"),
        (["--engine", "embedded", "--servers", "1"], "--servers: an embedded engine has no servers"),
        (["--engine", "embedded", "--python", "p"], "--python: an embedded engine has no servers"),
        (["--engine", "embedded", "--gpus", "3"], "--gpus 3 with --engine embedded: one GPU for the learner"),
        (["--python", "p", "--gpus", "5"], "--gpus 5: this machine has 4"),
        (
            ["--python", "p", "--servers", "5", "--gpus", "4"],
            "--servers 5: at least one, and at most one for each of the",
        ),
        (["--python", "p", "--per-gpu", "2", "--gpus", "0"], "--per-gpu 2: at least one server on each GPU"),
        (["--python", "p", "--gpus", "-1"], "--gpus -1: this machine has 4"),
        (["--python", "p", "--at-once", "0"], "--steps and --at-once: at least 1"),
        (["--python", "p", "--steps", "0"], "--steps and --at-once: at least 1"),
        (
            ["--python", "p", "--lags", "0", "4", "--colocated", "--lag-seconds", "1", "2"],
            "--lag-seconds has 2 numbers",
        ),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: list[str], reason: str) -> None:
    assert refusal(command_line().parse_args(words), 4).startswith(reason)


def test_each_run_may_have_its_own_time_and_the_colocated_one_comes_last() -> None:
    words = ["--python", "p", "--gpus", "0", "--lags", "4", "0", "--colocated", "--lag-seconds"]
    assert cases(parse([*words, "9"])) == {
        Case(4, old_groups="default"): 9.0,
        Case(0): 9.0,
        Case(0, colocated=True): 9.0,
    }
    assert list(cases(parse([*words, "1", "2", "3"])).values()) == [1.0, 2.0, 3.0]


def test_each_treatment_of_old_groups_is_measured_at_each_age_bound_above_0() -> None:
    words = ["--engine", "embedded", "--gpus", "0", "--lags", "0", "2", "--old-groups", "evict", "wait", "both"]
    found = list(cases(parse(words)))
    assert found == [Case(0), Case(2), Case(2, old_groups="wait"), Case(2, old_groups="both")]
    assert [case.label for case in found] == ["0", "2", "2 wait", "2 both"]
    assert found[2].name == "lag-2-wait"
    settings = Loop(parse(words)).settings(found[3])
    assert {"replay.old_groups.wait_s=5.0", "replay.old_groups.mask=true", "replay.max_lag=2"} <= set(settings)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(0, colocated=True), ["--python", "python3", "--server=--attention-backend 'a b'"]),
        (Case(4), ["--python", "python3", "--workload", "short"]),
        (Case(4), ["--engine", "embedded", "--workload", "short"]),
        (Case(0), ["--engine", "embedded"]),
    ],
    ids=["colocated", "servers", "embedded", "embedded-agent"],
)
def test_a_run_takes_the_settings_of_its_case(tmp_path: Path, case: Case, words: list[str]) -> None:
    loop = Loop(parse(["--size", "tiny", "--gpus", "0", "--dir", str(tmp_path), *words]))
    loop.urls = ["http://127.0.0.1:1"]
    config = read(loop.settings(case), names_missing_data=False)
    assert (config.cluster.colocated, config.replay.max_lag) == (case.colocated, case.max_lag)
    assert config.engine.launches == case.colocated
    assert config.engine.kind == ("embedded" if "embedded" in words else "sglang")
    assert (config.actor.agent is None, list(config.actor.interactions)) == (
        ("short" in words, ["drawn"] if "short" in words else [])
    )
    if case.colocated:
        assert config.engine.server.arguments[-2:] == ["--attention-backend", "a b"]


def test_the_report_says_which_age_bounds_were_not_measured(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = result(measured)
    own.content["failed"] = {4: "ended before its first step"}
    own.write()
    loop_report.main([str(measured / "gpu_loop-test.json")])
    printed = capsys.readouterr().out
    assert printed.startswith("test, a GPU, ")
    assert "\nmax_lag 4: ended before its first step\n" in printed


def test_the_report_of_two_machines_has_both_results_though_their_files_have_one_name(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = result(tmp_path, "another GPU")
    other.content |= {"sglang": "0.5.23", "bare_tokens_per_s": 50.0}
    files = [str(measured / "gpu_loop-test.json"), str(other.write())]
    loop_report.main(files)
    printed = capsys.readouterr().out
    assert f"{files[0]}, a GPU, " in printed
    assert f"{files[1]}, another GPU, " in printed


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_report_of_a_committed_result_has_a_line_for_each_age_bound(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop_report.main([str(path)])
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(path.read_text())["result"]
    assert sum(line.startswith("max_lag ") for line in printed) == len(found["failed"])
    assert sum(line.startswith("| ") for line in printed) == 2 + len(found["rows"])


@pytest.mark.parametrize("content", [None, "{", '{"result": []}'], ids=["missing", "cut", "another"])
def test_a_file_that_cannot_be_reported_is_told_in_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "gpu_loop-mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        loop_report.main([str(path)])
    assert str(ended.value.code).startswith(f"{path}: ")
    assert "\n" not in str(ended.value.code)
