"""The demo's table."""

from __future__ import annotations

from asyncrl.demo.summary import table


def test_the_table_leaves_out_what_a_run_did_not_measure() -> None:
    rows = table({"accuracy_before": None, "learner_idle": 0.25, "steps": 3})
    assert [list(column.cells) for column in rows.columns] == [["learner idle", "steps"], ["25.0%", "3"]]
