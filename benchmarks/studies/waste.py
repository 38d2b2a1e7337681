"""Which admission throws least away at equal idleness: how many episodes in flight, and at which age bound?

python -m benchmarks.studies.waste --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import Study

STUDY = Study(
    name="waste",
    question="Which number of episodes in flight throws least away at equal idleness?",
    factors={
        "max_lag": {str(lag): {"replay.max_lag": lag} for lag in (1, 2, 4)},
        "in flight": {
            str(count): {"actor.concurrency": count, "engine.slots": count} for count in (16, 32, 64, 128, 192)
        },
        "evicted tasks": {"lost": {}, "again": {"replay.reissue_evicted": True}},
    },
    panels="max_lag",
    shown=("evicted", "learner idle", "best accuracy"),
)

if __name__ == "__main__":
    main(STUDY)
