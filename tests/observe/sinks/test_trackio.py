"""The records that trackio keeps on this machine, read out of its database."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.observe.sinks.support import HOSTILE

pytestmark = pytest.mark.slow
pytest.importorskip("trackio")

PROGRAM = """
import sys
from pathlib import Path
from asyncrl.observe.sinks.trackio import Trackio
from tests.observe.sinks.support import play, source
folder = Path(sys.argv[1])
play(lambda: Trackio(source(folder)), folder / "model")
"""


def test_curves_histograms_traces_and_models_of_a_role_that_started_twice_are_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    # The package reads its variables when it is loaded.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, env=environment, timeout=300)
    with closing(sqlite3.connect(tmp_path / "trackio" / "project.db")) as database:
        found = database.execute("select run_name, step, metrics from metrics order by id")
        rows = [(name, step, json.loads(row)) for name, step, row in found]
        traces = database.execute("select step, messages, metadata from traces").fetchall()
        models = database.execute("select name, type from artifacts").fetchall()
    assert {name for name, _, _ in rows} == {"0123abcd-learner"}
    losses = [(step, row["loss"]) for _, step, row in rows if "loss" in row]
    assert losses == [(0, 1.0), (1, 0.0), (2, -1.0), (2, 8.0), (3, 7.0)]
    [histogram] = [row["histogram/lag"] for _, _, row in rows if "histogram/lag" in row]
    assert (histogram["values"], histogram["bins"]) == ([3.0, 1.0], [-0.5, 0.5, 1.5])
    shown = [(step, json.loads(text)[1]["content"], json.loads(facts)["reward"]) for step, text, facts in traces]
    assert shown == 2 * [(3, HOSTILE, 0.5)], "one of training, one held out"
    assert models == [(f"{tmp_path.name}-model", "model")]
