"""benchmarks.gpu_loop over two real servers on the CPU, ended by a signal in the middle of its third age bound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_loop
from tests.helpers import until

STEPS = 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_was_measured_before_a_signal_is_kept_and_nothing_stays_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_loop", "--python", os.environ["ASYNCRL_SGLANG_PYTHON"]]
    command += ["--size", "tiny", "--gpus", "0", "--servers", "2", "--steps", str(STEPS), "--lags", "0", "4", "8"]
    command += ["--dir", str(tmp_path / "runs"), "--out", str(tmp_path), "--name", "test"]
    log = tmp_path / "benchmark.log"
    with log.open("wb") as output:
        benchmark = subprocess.Popen(command, cwd=Path(gpu_loop.__file__).parents[1], stdout=output, stderr=output)
    try:
        until(lambda: benchmark.poll() is not None or "max_lag 8" in log.read_text(), 900)
        assert benchmark.poll() is None, log.read_text()
        until(lambda: (tmp_path / "runs/tiny-0/lag-8/logs/actor-0.log").exists(), 120)
        assert started_below(tmp_path)
    finally:
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(120) == 130, log.read_text()
    until(lambda: not started_below(tmp_path), 30)
    result = json.loads((tmp_path / "gpu_loop-test.json").read_text())["result"]
    assert result["failed"] == {}
    assert result["bare_tokens_per_s"] > 0
    assert [row["max_lag"] for row in result["rows"]] == [0, 4]
    for row in result["rows"]:
        check(row)
    assert result["rows"][0]["evicted"] == 0


def check(row: dict[str, Any]) -> None:
    assert row["steps"] == STEPS
    assert row["samples_per_s"] > 0
    assert row["fleet_to_bare"] > 0
    assert 0 <= row["fleet_idle"] <= 1
    assert 0 <= row["learner_idle"] <= 1
    assert all(int(lag) <= row["max_lag"] for lag in (*row["lags"], *row["token_lags"]))
    assert row["counts"]["updates"] > 0
    assert row["counts"]["episodes_failed"] == row["counts"]["requests_lost"] == 0
    assert row["push"]["switch_s"] > 0
    assert row["push"]["pause_max_s"] >= row["push"]["pause_median_s"] > 0
    assert abs(row["mismatch_k3"]) < 1e-4


def started_below(folder: Path) -> list[str]:
    """The command lines of processes that name a folder, other than this test's own."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder / "runs" / "tiny-0") in word for word in process.info["cmdline"] or ())
    ]
