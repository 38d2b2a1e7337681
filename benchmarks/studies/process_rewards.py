"""Finds at which horizon and with how good a scorer process rewards pay, and where they are hacked.

The scorer (`asyncrl/commands/demo/ladder/judge.py`) computes the right scores, with a share of errors by its level.
Here repeated steps are right, since a call names only an operator. So the guards against repeated steps are off.

    python -m benchmarks.studies.process_rewards --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import MODEL, RUNG, Settings, Study

SCORED: Settings = {"scoring.prm.family": "asyncrl.commands.demo.ladder.StepJudge"}
GUARDS_OFF: Settings = {"scoring.shaping.enable_anti_hack": False}

PURE: Settings = {
    **SCORED,
    **GUARDS_OFF,
    "scoring.shaping.prm_aggregation": "per_step",
    "algorithm.advantage": {"name": "pure", "params": {"temperature": 0.1, "outcome_weight": 0.1}},
}
IMPLICIT: Settings = {
    "algorithm.advantage": {"name": "prime"},
    "implicit.train": True,
    "implicit.path": MODEL,
    "implicit.lr": 1e-4,
}

METHODS: dict[str, Settings] = {
    "outcome": {},
    "mean": {**SCORED, **GUARDS_OFF, "scoring.shaping.process_weight": 0.5},
    "least": {**SCORED, **GUARDS_OFF, "scoring.shaping.process_weight": 0.5, "scoring.shaping.prm_aggregation": "min"},
    # Scores are in [-1, 1], as in `scoring=pure`.
    "pure": {**PURE, "scoring.shaping.use_logit_tanh": True, "scoring.shaping.tanh_rmax": 1.0},
    "pure from 0": PURE,
    "process_grpo": {
        **SCORED,
        **GUARDS_OFF,
        "scoring.shaping.prm_aggregation": "per_step",
        "algorithm.advantage": {"name": "process_grpo", "params": {"outcome_weight": 1.0}},
    },
    "implicit": IMPLICIT,
    "implicit, slow": {**IMPLICIT, "implicit.lr": 1e-5},
}

UNSCORED = ("outcome", "implicit", "implicit, slow")
OPERATIONS = (2, 6, 10)
ACCURACIES = (95, 70)

STUDY = Study(
    name="process_rewards",
    question="At which horizon and with how good a scorer do process rewards pay, and where are they hacked?",
    factors={
        "operations": {str(count): {RUNG: f"brackets-{count}"} for count in OPERATIONS},
        "method": METHODS,
        "scorer": {
            "none": {},
            **{f"{share}%": {"scoring.prm.params": {"accuracy": share / 100}} for share in ACCURACIES},
        },
    },
    panels="operations",
    settings={"replay.max_lag": 2},
    baseline={"method": "outcome", "scorer": "none"},
    skipped=[
        *({"method": method, "scorer": scorer} for method in UNSCORED for scorer in ("95%", "70%")),
        *({"method": method, "scorer": "none"} for method in METHODS if method not in UNSCORED),
    ],
)

if __name__ == "__main__":
    main(STUDY)
