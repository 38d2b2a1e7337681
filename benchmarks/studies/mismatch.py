"""Compares what each correction repairs if engine and learner do not compute the same.

The learner computes in float32, and the engine in float32, bfloat16, or with matrices rounded to int8 or int4. With
kept keys an episode continues after an update of the weights with its old keys and values, as with
`weights.mode=in_place`. Its log-probs are always those of the sampling.

    python -m benchmarks.studies.mismatch --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.age import CORRECTIONS, at_lag
from benchmarks.studies.command import main
from benchmarks.studies.study import LR, Settings, Study

ENGINES: dict[str, Settings] = {
    "float32": {},
    "bfloat16": {"engine.dtype": "bfloat16"},
    "int8": {"engine.dtype": "int8"},
    "int4": {"engine.dtype": "int4"},
    "kept keys": {"weights.mode": "in_place"},
}
RATES = {"none": 3e-5, "truncate": 3e-5, "icepop": 3e-5, "sequence mask": 3e-5, "ppo": 1e-4, "dppo": 3e-5}
"""The learning rates that `age` found with these settings and the engine in float32."""

STUDY = Study(
    name="mismatch",
    question="Which correction repairs what, if engine and learner do not compute the same?",
    factors={"engine": ENGINES, "correction": {name: {**CORRECTIONS[name], LR: RATES[name]} for name in RATES}},
    panels="engine",
    settings=at_lag(4),
    baseline={"correction": "none"},
    shown=("best accuracy", "gain", "mismatch, k3"),
)

if __name__ == "__main__":
    main(STUDY)
