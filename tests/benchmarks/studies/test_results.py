"""The file of a study's results, and what is not one."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.studies.results import Results, ResultsError
from tests.benchmarks.studies.support import STUDY, row

FOREIGN = [
    (pa.table({"price": [1.0]}), "there is no column fingerprint"),
    (pa.table({"fingerprint": ["abc"], "step": ["two"]}), "its column step is string, not int64"),
]


@pytest.mark.parametrize(("table", "reason"), FOREIGN)
def test_a_file_of_another_program_is_refused_and_stays(table: pa.Table, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "toy.parquet"
    results = Results(path, STUDY.factors)
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=f"{path} has no results of a study.*{reason}"):
        Results(path, STUDY.factors)
    run = STUDY.run({"size": "small", "colour": "red"}, 0, 0.1, {})
    with pytest.raises(ResultsError, match=reason):
        results.add(run, [row(2, 0.5)], 1, datetime.date(2026, 1, 1))
    assert pq.read_table(path).equals(table)
