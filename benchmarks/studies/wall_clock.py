"""How long does asynchronous training take to the accuracy that synchronous training reaches, on the same machine?

Run it one at a time, on a machine that does nothing else: seconds are the figure.

    python -m benchmarks.studies.wall_clock --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import Study

STUDY = Study(
    name="wall_clock",
    question="How long does training take to the same held-out accuracy, asynchronous and synchronous?",
    factors={
        "tools": {
            "fast": {},
            "slow": {"actor.tools": ["asyncrl.demo.ladder.tools.SlowLadderCalculator"]},
        },
        "max_lag": {str(lag): {"replay.max_lag": lag} for lag in (0, 1, 2, 4, 8)},
    },
    panels="tools",
    settings={"learner.minibatches": 2},
    shown=("seconds to target", "samples to target", "best accuracy"),
)

if __name__ == "__main__":
    main(STUDY)
