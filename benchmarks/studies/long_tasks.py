"""Do long tasks learn less if groups that become too old are thrown away?

Training tasks have 2 to 10 operations, each a call that takes a second on average, so the groups of long tasks become
too old most often. The held-out tasks have 10 operations. `wait`, `mask` and `both` are the treatments of
docs/replay.md.

    python -m benchmarks.studies.long_tasks --seeds 3
"""

from __future__ import annotations

from typing import Any

from asyncrl.commands.demo.ladder import SlowLadderCalculator
from benchmarks.studies.age import at_lag
from benchmarks.studies.command import main
from benchmarks.studies.study import HELD_OUT, Settings, Study

SCALE_S = 0.3
"""The shortest delay of a call. The mean is three times as long."""


class SlowerCalculator(SlowLadderCalculator):
    """SlowLadderCalculator with three times its delays."""

    async def create(self, scale_s: float | None = SCALE_S, *args: Any, **kwargs: Any) -> None:
        await super().create(scale_s, *args, **kwargs)


TREATMENTS: dict[str, Settings] = {
    "evict": {},
    "wait": {"replay.old_groups.wait_s": 600.0},
    "mask": {"replay.old_groups.mask": True},
    "both": {"replay.old_groups.wait_s": 5.0, "replay.old_groups.mask": True},
}

STUDY = Study(
    name="long_tasks",
    question="Do long tasks learn less if groups that become too old are thrown away?",
    factors={"max_lag": {str(lag): at_lag(lag) for lag in (1, 2, 4)}, "old_groups": TREATMENTS},
    panels="max_lag",
    settings={
        HELD_OUT: "brackets-10",
        "learner.eval_every": 10,
        "actor.tools": ["benchmarks.studies.long_tasks.SlowerCalculator"],
        "replay.sampler.kind": "oldest",
    },
    baseline={"old_groups": "evict"},
    shown=("last accuracy", "gain", "evicted", "length, trained / sampled", "seconds of all steps"),
)

if __name__ == "__main__":
    main(STUDY)
