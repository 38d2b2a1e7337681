"""A small study, its rows, and a stand-in for `asyncrl train` that takes no time."""

from __future__ import annotations

from benchmarks.studies.__main__ import all_studies
from benchmarks.studies.figures import Row
from benchmarks.studies.study import Search, Study

STUDIES = list(all_studies())

STUDY = Study(
    name="toy",
    question="Which colour is best at which size?",
    factors={
        "size": {"small": {"learner.steps": 2}, "large": {"learner.steps": 4}},
        "colour": {"red": {"algorithm.loss": {"name": "ppo"}}, "blue": {"algorithm.loss": {"name": "gspo"}}},
    },
    panels="size",
    baseline={"colour": "red"},
    search=Search("colour", rates=(1e-4, 1e-5), at={"size": "small"}),
    skipped=[{"size": "large", "colour": "blue"}],
)


def row(step: int | None, accuracy: float | None = None, **values: object) -> Row:
    """A row as the results give it; what is not named is unknown."""
    names = (
        "seed",
        "samples",
        "seconds",
        "lag_mean",
        "lag_max",
        "entropy",
        "ess",
        "k3",
        "evicted",
        "idle",
        "reward",
        "agreement",
        "hack_alarms",
        "run_seconds",
    )
    unknown = dict.fromkeys(names)
    return {**unknown, "step": step, "accuracy": accuracy, "status": "done", "reason": "", **values}
