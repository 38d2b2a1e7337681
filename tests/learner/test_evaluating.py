"""Each evaluation is logged once, even if the learner is killed and resumes with other settings."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.batch.settings import KeepSettings
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.evaluating import Evaluating
from asyncrl.learner.publishing import Versions
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.run import remove_repeated
from asyncrl.learner.stop_request import StopRequest
from asyncrl.observe.metrics import Fanout
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.lines import read_lines


class Evaluated:
    """A replay in which every evaluation is complete at once."""

    def __init__(self) -> None:
        self.requested: list[int] = []

    def evaluate(self, version: int) -> None:
        self.requested.append(version)

    def evaluation(self, version: int, wait: bool) -> Mapping[str, Any]:
        return {"accuracy": version / 100, "tokens": 9, "newer_tokens": 0, "sources": {}, "sample": []}


def resumed(run_dir: Path, replay: Evaluated, progress: Progress, every: int, asks: bool = True) -> Evaluating:
    """The evaluations of a run of 100 steps that resumes with this progress."""
    ranks = Ranks.alone()
    evaluating = Evaluating(
        every,
        Versions(1, 100),
        cast(BatchSource, replay),
        Checkpoints(run_dir / "checkpoints", 2, ranks),
        EpisodeKeeper(KeepSettings(0, 0, 0, 0), ranks, None),
        Fanout([JsonLines(metrics_file(run_dir, "evaluation"))]),
        progress,
        StopRequest(ranks, threading.Event()),
        asks=asks,
        waits=False,
        rated_by=None,
    )
    remove_repeated(run_dir, progress, evaluating.is_due)
    return evaluating


def logged(run_dir: Path) -> dict[int, float]:
    rows = read_lines(metrics_file(run_dir, "evaluation"))
    found = {row["step"]: row["eval/accuracy"] for row in rows}
    assert len(found) == len(rows), "each step has one row"
    return found


def test_the_last_evaluation_of_a_solved_run_is_logged_once_over_restarts(tmp_path: Path) -> None:
    for _ in range(3):
        # The checkpoint of step 57 was written before the evaluation of step 40 was complete.
        progress = Progress(step=57, evaluations={40: 40})
        evaluating = resumed(tmp_path, Evaluated(), progress, every=20)
        evaluating.evaluate(57)
        evaluating.finish(57)
        assert logged(tmp_path) == {40: 0.4, 57: 0.57}
        assert not progress.evaluations
    evaluating = resumed(tmp_path, Evaluated(), Progress(step=57), every=20)
    evaluating.evaluate(57)
    assert logged(tmp_path) == {40: 0.4, 57: 0.57}, "a run that goes on keeps the evaluation"


def test_an_evaluation_that_is_not_complete_is_logged_even_if_the_run_resumes_without_evaluations(
    tmp_path: Path,
) -> None:
    # It was logged after the checkpoint of step 50, and the learner was killed.
    JsonLines(metrics_file(tmp_path, "evaluation")).log(40, {"eval/accuracy": 0.4})
    progress, replay = Progress(step=50, evaluations={40: 40}), Evaluated()
    evaluating = resumed(tmp_path, replay, progress, every=0)
    evaluating.evaluate(50)
    evaluating.finish(100)
    assert logged(tmp_path) == {40: 0.4}
    assert not progress.evaluations
    assert replay.requested == []


def test_a_learner_that_publishes_nothing_waits_for_no_evaluation(tmp_path: Path) -> None:
    replay = Evaluated()
    resumed(tmp_path, replay, Progress(step=50, evaluations={40: 40}), every=0, asks=False).finish(100)
    assert logged(tmp_path) == {}
    assert replay.requested == []
