"""Our exact estimates of best@k and maj@k compared with the bootstrap of verl's validation, if ASYNCRL_VERL_PYTHON
names a Python that has verl."""

from __future__ import annotations

import json
import os
import subprocess
from statistics import fmean

import pytest

from asyncrl.replay.held_out.estimates import best_at, majority_at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]

VERL = """
import json, sys
from verl.trainer.ppo.metric_utils import process_validation_metrics
given = json.load(sys.stdin)
found = process_validation_metrics(given["sources"], given["uids"], {"acc": given["values"], "pred": given["votes"]})
json.dump({source: metrics["acc"] for source, metrics in found.items()}, sys.stdout)
"""
COPIES = 64
"""The copies of each attempt. With so many, subsets without replacement are nearly samples with replacement, which verl
takes."""


def test_verls_bootstrap_estimates_the_same() -> None:
    tasks = {
        "easy": [("7", 1.0)] * 5 + [("8", 0.0), ("9", 0.0), ("9", 0.0)],
        "split": [("7", 1.0)] * 4 + [("8", 0.0)] * 4,
        "graded": [(str(number), number / 8) for number in range(8)],
    }
    rows = [(name, *attempt) for name, attempts in tasks.items() for attempt in attempts]
    sources, votes, values = zip(*rows, strict=True)
    asked = json.dumps({"sources": sources, "uids": sources, "votes": votes, "values": values})
    command = [os.environ["ASYNCRL_VERL_PYTHON"], "-c", VERL]
    theirs = json.loads(subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout)
    for name, attempts in tasks.items():
        votes, values = zip(*attempts * COPIES, strict=True)
        assert theirs[name]["mean@8"] == pytest.approx(fmean(values))
        for k in (2, 4, 8):
            assert best_at(k, values) == pytest.approx(theirs[name][f"best@{k}/mean"], abs=0.05)
            assert majority_at(k, votes, values) == pytest.approx(theirs[name][f"maj@{k}/mean"], abs=0.06)
