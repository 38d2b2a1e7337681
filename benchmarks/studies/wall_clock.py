"""Measures how long asynchronous training takes to the accuracy of synchronous training, on the same machine.

Each age bound has as many episodes in flight as it admits, as in `age`. The figure is seconds, so run the study on an
idle machine, with two cores for each run at a time.

    python -m benchmarks.studies.wall_clock --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.age import at_lag
from benchmarks.studies.command import main
from benchmarks.studies.study import Study

STUDY = Study(
    name="wall_clock",
    question="How long does training take to the same held-out accuracy, asynchronous and synchronous?",
    factors={
        "tools": {
            "fast": {},
            "slow": {"actor.tools": ["asyncrl.commands.demo.ladder.SlowLadderCalculator"]},
        },
        "max_lag": {str(lag): at_lag(lag) for lag in (0, 1, 2, 4)},
    },
    panels="tools",
    over="seconds",
    baseline={"max_lag": "0"},
    shown=("seconds to target", "samples to target", "seconds of all steps", "gain"),
)

if __name__ == "__main__":
    main(STUDY)
