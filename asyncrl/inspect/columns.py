"""The Parquet schema of an exported run: documented in docs/replay.md, the same for every run of this format.

A run is a folder of three files: a row a trajectory, a row a batch plan, a row a dead letter. Names are those of
`asyncrl.types` and of the store's records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.replay.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.types import BatchPlan, Finish, Labels, Role, Step, ToolCall, Trajectory, Turn, runs_of

FORMAT = 2
TRAJECTORIES_FILE, PLANS_FILE, LETTERS_FILE = "trajectories.parquet", "plans.parquet", "dead_letters.parquet"

_NUMBERS = pa.map_(pa.string(), pa.float64())
_CALLS = pa.list_(pa.struct({"name": pa.string(), "arguments": pa.string()}))
_SPAN = {"start": pa.int32(), "end": pa.int32()}

TRAJECTORIES = pa.schema(
    {
        "id": pa.string(),
        "task_id": pa.string(),
        "group_id": pa.string(),
        "member": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "turns": pa.list_(
            pa.struct({**_SPAN, "role": pa.string(), "finish_reason": pa.string(), "tool_calls": _CALLS})
        ),
        "steps": pa.list_(pa.struct(_SPAN)),
        "finish": pa.string(),
        "rewards": _NUMBERS,
        "timings": _NUMBERS,
        "reward": pa.float64(),
        "outcome": pa.float64(),
        "scorer": pa.string(),
        "step_scores": pa.list_(pa.float32()),
        "step_ends": pa.list_(pa.int32()),
        "extra": _NUMBERS,
        "oldest": pa.int32(),
        "state": pa.string(),
        "attempts": pa.int32(),
        "scored": pa.int32(),
        "plans": pa.int32(),
        "last_plan": pa.int32(),
        "trained": pa.int32(),
    }
)
ARRAYS = ["tokens", "loss_mask", "logprobs", "versions", "step_scores", "step_ends"]
PLANS = pa.schema(
    {
        "step": pa.int32(),
        "version": pa.int32(),
        "ids": pa.list_(pa.string()),
        "group_ids": pa.list_(pa.string()),
        "tokens": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.int32()),
        "weights": pa.list_(pa.float64()),
        "skipped": pa.string(),
    }
)
LETTERS = pa.schema(
    {
        "id": pa.string(),
        "reason": pa.string(),
        "group": pa.string(),
        "member": pa.int32(),
        "attempt": pa.int32(),
        "row": pa.int32(),
        "scoring": pa.bool_(),
    }
)


def trajectory_row(record: StoredTrajectory) -> dict[str, Any]:
    """The row of a trajectory whose data is there; label columns are null where it has no labels."""
    trajectory, facts = record.trajectory, record.facts
    assert trajectory is not None
    assert facts is not None
    return {
        **{name: getattr(trajectory, name) for name in ("id", "task_id", "group_id", "member")},
        **{name: getattr(trajectory, name) for name in ("tokens", "loss_mask", "logprobs", "versions")},
        "turns": [_turn_row(turn) for turn in trajectory.turns],
        "steps": [{"start": step.start, "end": step.end} for step in trajectory.steps],
        "finish": trajectory.finish.value,
        "rewards": list(trajectory.rewards.items()),
        "timings": list(trajectory.timings.items()),
        **_labels_row(record.labels),
        **{name: getattr(facts, name) for name in ("oldest", "state", "attempts", "scored")},
        **{name: getattr(facts, name) for name in ("plans", "last_plan", "trained")},
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    # A struct has all fields of its column, and arguments of different tools differ: hence JSON text.
    calls = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in turn.tool_calls]
    return {
        "start": turn.start,
        "end": turn.end,
        "role": turn.role.value,
        "finish_reason": turn.finish_reason,
        "tool_calls": calls,
    }


def _labels_row(labels: Labels | None) -> dict[str, Any]:
    if labels is None:
        return dict.fromkeys(("reward", "outcome", "scorer", "step_scores", "step_ends", "extra"))
    return {
        **{name: getattr(labels, name) for name in ("reward", "outcome", "scorer", "step_scores", "step_ends")},
        "extra": list(labels.extra.items()),
    }


def trajectory_batch(records: Sequence[StoredTrajectory]) -> pa.RecordBatch:
    """Rows of `TRAJECTORIES`."""
    rows = [trajectory_row(record) for record in records]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[field.name] for row in rows], field.type) for field in TRAJECTORIES], schema=TRAJECTORIES
    )


def read_trajectories(batch: pa.RecordBatch) -> list[StoredTrajectory]:
    """The records in a batch of `TRAJECTORIES`. Raises InvariantError or ValueError: they are none."""
    rows = batch.drop_columns(ARRAYS).to_pylist()
    return [_record(row, batch, index) for index, row in enumerate(rows)]


def _record(row: dict[str, Any], batch: pa.RecordBatch, index: int) -> StoredTrajectory:
    trajectory = Trajectory(
        **{name: row[name] for name in ("id", "task_id", "group_id", "member")},
        tokens=_array(batch, "tokens", index, np.int32),
        logprobs=_array(batch, "logprobs", index, np.float32),
        version_runs=runs_of(_array(batch, "versions", index, np.int32)),
        turns=tuple(_turn(turn) for turn in row["turns"]),
        steps=tuple(Step(**step) for step in row["steps"]),
        finish=Finish(row["finish"]),
        rewards=dict(row["rewards"]),
        timings=dict(row["timings"]),
    )
    labels = _labels(row, batch, index)
    facts = TrajectoryRecord(
        trajectory.group_id,
        trajectory.member,
        len(trajectory),
        trajectory.sampled_tokens,
        trajectory.oldest_version,
        state=TrajectoryState(row["state"]),
        **{name: row[name] for name in ("attempts", "scored", "plans", "last_plan", "trained")},
        reward=labels.reward if labels else 0.0,
        outcome=labels.outcome if labels else 0.0,
    )
    return StoredTrajectory(facts, trajectory, labels, None)


def _turn(row: dict[str, Any]) -> Turn:
    calls = tuple(ToolCall(call["name"], json.loads(call["arguments"])) for call in row["tool_calls"])
    return Turn(row["start"], row["end"], Role(row["role"]), row["finish_reason"], calls)


def _labels(row: dict[str, Any], batch: pa.RecordBatch, index: int) -> Labels | None:
    if row["reward"] is None:
        return None
    return Labels(
        trajectory_id=row["id"],
        **{name: row[name] for name in ("reward", "outcome", "scorer")},
        step_scores=_array(batch, "step_scores", index, np.float32),
        step_ends=_array(batch, "step_ends", index, np.int32),
        extra=dict(row["extra"]),
    )


def _array(batch: pa.RecordBatch, name: str, index: int, dtype: type[np.generic]) -> Any:
    return batch.column(name)[index].values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def plan_row(plan: BatchPlan) -> dict[str, Any]:
    """The row of a batch plan."""
    return {name: getattr(plan, name) for name in PLANS.names}


def letter_row(name: str, letter: DeadLetter) -> dict[str, Any]:
    """The row of a dead letter, which is known by its ticket."""
    return {"id": name, **{each: getattr(letter, each) for each in LETTERS.names[1:]}}
