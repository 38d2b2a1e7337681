"""A study from its declaration to its file, by runs of all roles."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.commands.demo.ladder.prepare import prepare_rung
from benchmarks.studies import age, command
from tests.end_to_end.support import ROOT

pytestmark = pytest.mark.long

TINY = {
    **{"learner.steps": 2, "learner.eval_every": 2, "learner.batch_size": 8, "learner.lr": 1e-4, "rung": "brackets-2"},
    **{"actor.concurrency": 8, "engine.slots": 8},
}


def test_a_study_runs_all_roles_and_a_second_call_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = [f"{key}={value}" for key, value in TINY.items()]
    words += ["--seeds", "1", "--only", "correction=icepop", "max_lag=0", "max_lag=2", "--results", str(tmp_path)]
    for _ in range(2):
        command.main(
            age.STUDY,
            words,
            tmp_path / "runs",
            prepare=lambda run: prepare_rung(tmp_path / "cache", run.rung, run.seed, print, 2),
        )
        assert "all runs have ended" in capsys.readouterr().err
    rows = pq.read_table(tmp_path / "age.parquet").to_pylist()
    assert [(row["max_lag"], row["step"], row["samples"]) for row in rows] == [
        *(("0", 0, 0), ("0", 2, 16)),
        *(("2", 0, 0), ("2", 2, 16)),
    ]
    assert {(row["correction"], row["status"], row["rung"]) for row in rows} == {("icepop", "done", "brackets-2")}
    assert all(row["lag_max"] <= int(row["max_lag"]) for row in rows if row["step"])
    assert all(0 < row["ess"] <= 1 and row["entropy"] > 0 and row["seconds"] > 0 for row in rows if row["step"])
