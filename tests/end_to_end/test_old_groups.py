"""Whole runs with each treatment of groups that become too old."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.data.command import convert
from asyncrl.replay.stored import StoredRun
from tests.end_to_end.support import Run
from tests.learner.support import write_model

pytestmark = pytest.mark.slow

Start = Callable[..., Run]
EXCERPT = Path(__file__).parents[1] / "data" / "gsm8k"
STEPS, MAX_LAG = 16, 1
WAIT, NO_WAIT = "replay.old_groups.wait_s=600", "replay.old_groups.wait_s=0"
MASK, NO_MASK = "replay.old_groups.mask=true", "replay.old_groups.mask=false"


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [[NO_WAIT, NO_MASK], [], [NO_MASK], [WAIT, NO_MASK], [NO_WAIT, MASK], [WAIT, MASK]],
    ids=["evict", "default", "short wait", "wait", "mask", "both"],
)
def test_a_run_trains_no_token_that_is_too_old(options: list[str], start: Start, tmp_path: Path) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet", "train")
    model = write_model(tmp_path / "model")
    build_tokenizer().save_pretrained(model)
    run = start(
        "train",
        *("experiment=gsm8k_calculator", f"model.path={model}", "model.dtype=float32", "weights.mode=in_place"),
        *(f"data.train={tmp_path / 'gsm8k.parquet'}", "actor.max_turn_tokens=160", "replay.retention=all"),
        # Few slots for many episodes, so that some groups finish long after others.
        *("learner.batch_size=4", "learner.group_size=2", f"learner.steps={STEPS}", "actor.concurrency=5"),
        *(f"replay.max_lag={MAX_LAG}", *options),
    )
    run.finish()
    assert json.loads((run.dir / SUMMARY_FILE).read_text())["steps"] == STEPS
    assert all(row["lag/max"] <= MAX_LAG for row in run.steps())
    stored = StoredRun(run.dir / "replay")
    found = stored.audit(1)
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    assert found["largest_lag"] <= MAX_LAG
    counters = stored.counters()
    masked = 0
    for step in range(STEPS):
        plan = stored.plan(step)
        assert plan is not None
        for index, name in enumerate(plan.ids):
            trajectory = stored.trajectory(name)
            first = plan.first_trained[index] if plan.first_trained else 0
            assert first == 0 or first >= step - MAX_LAG
            young = trajectory.versions[trajectory.versions >= max(first, 0)]
            assert len(young) == plan.trained_tokens[index]
            assert all(step - young <= MAX_LAG)
            masked += trajectory.sampled_tokens - len(young)
    stored.close()
    assert counters["tokens_masked"] == masked
    if NO_MASK in options:
        assert masked == 0
    if WAIT in options:
        assert (counters["evicted"], masked, counters["wait_limits_reached"]) == (0, 0, 0)
