"""Which correction repairs what, if engine and learner do not compute the same?

The learner computes in float32. The engine does so too, or in bfloat16, or with matrices rounded to int8 or int4. With
kept keys an episode goes on over updates of the weights with the keys and values that it has, as servers do that pause
in place. Its log-probs are always those that it sampled with.

    python -m benchmarks.studies.mismatch --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.age import BATCH, CORRECTIONS, at_lag
from benchmarks.studies.command import main
from benchmarks.studies.study import Search, Settings, Study

ENGINES: dict[str, Settings] = {
    "float32": {},
    "bfloat16": {"engine.dtype": "bfloat16"},
    "int8": {"engine.dtype": "int8"},
    "int4": {"engine.dtype": "int4"},
    "kept keys": {"weights.mode": "in_place"},
}
COMPARED = ("none", "truncate", "icepop", "sequence mask", "ppo", "dppo")

STUDY = Study(
    name="mismatch",
    question="Which correction repairs what, if engine and learner do not compute the same?",
    factors={"engine": ENGINES, "correction": {name: CORRECTIONS[name] for name in COMPARED}},
    panels="engine",
    settings={
        **at_lag(4),
        "learner.batch_size": BATCH,
        "learner.steps": 40,
        "learner.minibatches": 2,
        "learner.eval_every": 8,
    },
    shown=("best accuracy", "samples to target", "mismatch, k3"),
    search=Search("correction", rates=(3e-5, 1e-4, 3e-4), at={"engine": "float32"}),
)

if __name__ == "__main__":
    main(STUDY)
