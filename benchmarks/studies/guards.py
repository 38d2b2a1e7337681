"""Shows what the guards report while a policy learns what its scorer likes.

Scorers and methods are those of `process_rewards` at its longest horizon. With `outcome` nothing trains on the scores.
A run takes only minutes, so the window of the alarm is shorter than by default.

    python -m benchmarks.studies.guards --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.process_rewards import ACCURACIES, METHODS, OPERATIONS, SCORED
from benchmarks.studies.study import RUNG, Settings, Study

WATCHED: dict[str, Settings] = {
    "outcome": {**SCORED, "scoring.shadow": True},
    **{name: METHODS[name] for name in ("mean", "least", "pure", "process_grpo")},
}

STUDY = Study(
    name="guards",
    question="What do the guards show while a policy learns what its scorer likes?",
    factors={
        "scorer": {f"{share}%": {"scoring.prm.params": {"accuracy": share / 100}} for share in ACCURACIES},
        "method": WATCHED,
    },
    panels="scorer",
    compared=("agreement, change", "last accuracy"),
    settings={RUNG: f"brackets-{OPERATIONS[-1]}", "replay.max_lag": 2, "scoring.guards.window_s": 60.0},
    baseline={"method": "outcome"},
    shown=("last accuracy", "gain", "reward, change", "agreement, change", "hack alarms"),
)

if __name__ == "__main__":
    main(STUDY)
