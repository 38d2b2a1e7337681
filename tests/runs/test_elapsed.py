"""The time for which a run has run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.launch.ownership import exclusively
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.elapsed import earlier_s, elapsed_s
from asyncrl.runs.environment import ENVIRONMENT_FILE
from asyncrl.runs.run import Run


def write(folder: Path, starts: list[float], rows: list[float]) -> Run:
    if starts:
        (folder / ENVIRONMENT_FILE).write_text(json.dumps({"starts": [{"time": begin} for begin in starts]}))
    now = [0.0]
    replay = JsonLines(metrics_file(folder, "replay"), lambda: now[0])
    for moment in rows:
        now[0] = moment
        replay.log(0, {"trained": 1})
    return Run(folder)


def test_pauses_between_starts_do_not_count(tmp_path: Path) -> None:
    run = write(tmp_path, [100.0, 1000.0], [105.0, 130.0, 1005.0, 1020.0])
    assert elapsed_s(run) == pytest.approx(30 + 20)
    assert earlier_s(run) == pytest.approx(30)
    with exclusively(tmp_path):
        assert elapsed_s(run, lambda: 1060.0) == pytest.approx(30 + 60), "it is running"


def test_a_start_that_wrote_no_row_does_not_count(tmp_path: Path) -> None:
    run = write(tmp_path, [100.0, 200.0, 1000.0], [110.0, 1010.0])
    assert elapsed_s(run) == pytest.approx(10 + 0 + 10)


def test_a_run_whose_starts_were_not_recorded_begins_with_its_first_row(tmp_path: Path) -> None:
    run = write(tmp_path, [], [105.0, 130.0])
    assert (elapsed_s(run), earlier_s(run)) == (25.0, 0)


def test_a_run_that_never_started_has_run_for_no_time(tmp_path: Path) -> None:
    assert elapsed_s(Run(tmp_path)) == 0.0


def test_the_number_of_the_summary_stays_until_the_next_start(tmp_path: Path) -> None:
    run = write(tmp_path, [100.0], [105.0, 130.0])
    (tmp_path / SUMMARY_FILE).write_text('{"result": "done", "elapsed_s": 34.5}')
    assert elapsed_s(run) == 34.5
    later = time.time() + 1000
    write(tmp_path, [100.0, later], [later + 10])
    assert elapsed_s(run) == pytest.approx(30 + 10)
