"""A whole run with keys, as small as one can be, tells what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.data.writing import write_tasks
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.chaos.world import BATCH, World
from tests.end_to_end.support import ROOT, Run
from tests.helpers import make_task
from tests.network.support import made
from tests.observe.registry.unknown import unknown

pytestmark = pytest.mark.slow


@pytest.mark.heavy
def test_a_run_without_any_reward_warns_and_its_folder_is_as_the_pages_say(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    world = World.make(tmp_path)
    small = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "replay.filter.zero_variance=false")
    write_tasks(tmp_path / "held_out.parquet", [make_task(index) for index in range(4)])
    steps = ("learner.steps=4", "learner.eval_every=2", f"data.eval={tmp_path / 'held_out.parquet'}")
    rule = "scoring.rule=tests.end_to_end.rules.worthless"
    keys = f"network.keys={made(tmp_path / 'keys')}"
    run = start("train", *world.overrides(1), *small, *steps, rule, keys)
    run.finish()
    summary = json.loads((run.dir / SUMMARY_FILE).read_text())
    assert (summary["result"], summary["steps"], summary["trajectories"]["trained"]) == ("done", 4, 4 * BATCH)
    assert summary["reward"] == summary["held_out"]["accuracy"] == {"first": 0, "last": 0}
    assert summary["failures"]["scorings"] > 0
    for text in ("every reward of steps 1 to 3 was 0", "the rule cannot judge the first", "asyncrl inspect list"):
        assert text in run.output
    assert [line["step"] for line in read_lines(metrics_file(run.dir, "learner"))] == [0, 1, 2, 3]
    assert [line["step"] for line in read_lines(metrics_file(run.dir, "evaluation"))] == [0, 2, 4]
    for path in (run.dir / "metrics").iterdir():
        names = {name for line in read_lines(path) for name in line}
        assert unknown(path.stem, names) == [], f"asyncrl/observe/registry/ lacks metrics of {path.name}"
        assert ("usage/memory_gb" in names) == (path.stem != "evaluation"), path.name
    explained = (ROOT / "docs" / "watching.md").read_text()
    assert {path.name for path in run.dir.iterdir() if f"`{path.name}" not in explained} == set()
    fields = re.findall(r"`(\w+)`", explained.partition("## The summary")[2])
    assert summary.keys() <= set(fields)
