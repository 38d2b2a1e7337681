"""The console, the status, the page, the report and the summary show one number for one meaning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.dashboard.overview import progress_of
from asyncrl.launch.ownership import exclusively
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.environment import ENVIRONMENT_FILE
from asyncrl.runs.live_rows import LINE_S
from asyncrl.runs.pace import PACE_STEPS
from asyncrl.runs.progress import RunProgress, progress_rows
from asyncrl.runs.report.page import tiles
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from asyncrl.runs.summary import summarise
from asyncrl.runs.summary_text import summary_rows, write_summary
from asyncrl.runs.terminal import TerminalTable
from asyncrl.text import duration
from tests.runs.support import write_run

STEPS = 3 * PACE_STEPS
START = 100.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which 60 of 80 steps are done, in a single start."""
    folder = write_run(tmp_path / "mine", [step / STEPS for step in range(STEPS)], {"learner.steps": 80}, START)
    (folder / ENVIRONMENT_FILE).write_text(json.dumps({"starts": [{"time": START, "cores": 2}]}))
    (folder / "processes.json").write_text('{"actor-0": {"host": "a", "pid": 1, "restarts": 0}}')
    actor = JsonLines(metrics_file(folder, "actor-0"), lambda: START + 2.0 * STEPS)
    actor.log(STEPS, {"tokens": 100.0 * STEPS, "seconds": 2.0 * STEPS, "tokens_per_s": 61.0, "idle": 0.25})
    return Run(folder)


def test_a_running_run_has_the_same_progress_on_console_status_and_page(run: Run) -> None:
    with exclusively(run.folder):
        page = progress_of(run, 80)
    status = dict(progress_rows(RunProgress(run).values(run.processes()), 80))
    console = TerminalTable(run, 80, 1, lambda: {"actor-0": 0})
    JsonLines(metrics_file(run.folder, "actor-0"), lambda: START + 2.0 * STEPS).log(STEPS, {"tokens_per_s": 61.0})
    shown = dict(console.rows())
    for name in ("step", "left", "reward", "lag", "sampled tokens/s now"):
        assert shown[name] == status[name]
    assert (f"{page['done']}/80", duration(page["left_s"])) == (shown["step"], shown["left"])
    assert f"{page['tokens_per_s']:.0f}" == shown["sampled tokens/s now"] == "61"


@pytest.mark.slow
def test_a_run_that_has_ended_has_the_same_results_on_console_page_and_report(run: Run) -> None:
    text = write_summary(run, 80, "done", "", "")
    console = dict(line.strip().split("  ", 1) for line in text.splitlines() if line.strip().count("  "))
    page, written, report = progress_of(run, 80), run.summary(), read_run(str(run.folder))
    assert duration(page["elapsed_s"]) == console["elapsed"].strip() == duration(2.0 * STEPS)
    assert page["tokens_per_s"] == written["speed"]["tokens_per_s"]
    assert f"{page['tokens_per_s']:.0f} sampled tokens/s" in console["speed"]
    on_report = {name: (value, remark) for name, value, remark in tiles(report)}
    assert on_report["elapsed"][1] == f"{page['tokens_per_s']:.3g} sampled tokens/s"
    assert on_report["reward"][0] == f"{written['reward']['last']:.3g}"
    assert on_report["reward"][1] == f"first {written['reward']['first']:.3g}"
    assert dict(summary_rows(report.summary))["reward"] == console["reward"].strip()


@pytest.mark.slow
def test_the_console_counts_the_time_of_earlier_starts_as_the_summary_does(run: Run) -> None:
    starts = [{"time": START}, {"time": START + 10_000.0}]
    (run.folder / ENVIRONMENT_FILE).write_text(json.dumps({"starts": starts}))
    now = [0.0]
    console = TerminalTable(run, 80, 1, dict, lambda: now[0])
    now[0] += LINE_S
    earlier = 2.0 * STEPS
    assert dict(console.rows())["elapsed"] == duration(earlier + LINE_S)
    assert asdict(summarise(run, 80, "stopped", "", ""))["elapsed_s"] == earlier
