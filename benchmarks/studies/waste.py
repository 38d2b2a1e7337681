"""Which admission throws least away at equal idleness: how many episodes in flight, and at which age bound?

Episodes differ in length, and their tools are slow now and then. Runs are short, since nothing is asked about learning.

    python -m benchmarks.studies.waste --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import Study

STUDY = Study(
    name="waste",
    question="Which number of episodes in flight throws least away at equal idleness?",
    factors={
        "max_lag": {str(lag): {"replay.max_lag": lag} for lag in (1, 4)},
        "in flight": {str(count): {"actor.concurrency": count, "engine.slots": count} for count in (32, 64, 128, 192)},
        "evicted tasks": {"lost": {}, "again": {"replay.reissue_evicted": True}},
    },
    panels="max_lag",
    settings={
        "actor.tools": ["asyncrl.demo.ladder.tools.SlowLadderCalculator"],
        "learner.steps": 16,
        "learner.eval_every": 16,
    },
    shown=("evicted", "learner idle", "seconds of all steps"),
)

if __name__ == "__main__":
    main(STUDY)
