"""Compares how much each admission throws away at equal idleness.

An actor runs all episodes that the age bound admits, or 64 at once, or the replay paces them (`replay.spare_batches`).
Batches take the groups that were complete first, or the oldest. Episodes differ in length, and some tool calls are
slow. With one actor generation is the limit, with two less so.

    python -m benchmarks.studies.waste --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import Settings, Study

MOST = 288
"""Episodes at once: as many as the larger age bound admits."""
ALL: Settings = {"actor.concurrency": MOST, "engine.slots": MOST}
OLDEST: Settings = {**ALL, "replay.sampler.kind": "oldest"}
ADMISSIONS: dict[str, Settings] = {
    "all": ALL,
    "64 an actor": {"actor.concurrency": 64, "engine.slots": 64},
    "all, oldest": OLDEST,
    "paced, oldest": {**OLDEST, "replay.spare_batches": 0.5},
}

STUDY = Study(
    name="waste",
    question="Which admission throws least away at equal idleness?",
    factors={
        "max_lag": {str(lag): {"replay.max_lag": lag} for lag in (4, 8)},
        "actors": {str(count): {"cluster.actors": count, "cluster.cpus": 1 + count} for count in (1, 2)},
        "admission": ADMISSIONS,
    },
    panels="actors",
    compared=("learner idle", "evicted"),
    settings={"actor.tools": ["asyncrl.commands.demo.ladder.SlowLadderCalculator"]},
    baseline={"admission": "all"},
    shown=("evicted", "learner idle", "lag used, mean", "seconds of all steps", "gain"),
)

if __name__ == "__main__":
    main(STUDY)
