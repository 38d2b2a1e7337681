"""Compares corrections on data of several ages, on a pretrained model that calls a calculator.

The model is that of examples/reasoning_gym after `asyncrl sft`, and the tasks are those of the example. Actors sample
as far ahead as the age bound allows, and groups are trained in the order of their completion. So where sampling is
faster than training, data become as old as the bound. Groups with equal rewards are trained, too.

    python -m benchmarks.studies.pretrained_age --model examples/reasoning_gym/runs/arithmetic_sft/model --seeds 2
"""

from __future__ import annotations

from benchmarks.studies.age import CORRECTIONS
from benchmarks.studies.command import main
from benchmarks.studies.study import LR, Study

LAGS = (1, 8, 16, 32)
CHOSEN = ("truncate", "none", "sequence mask", "vespo", "luspo", "vaco")
"""The default, no correction, and those that gained with each seed at `max_lag=32` in the study `age`, at the default's
learning rate."""

STUDY = Study(
    name="pretrained_age",
    question="Which correction holds at which age of the data, for a pretrained model?",
    factors={
        "max_lag": {str(lag): {"replay.max_lag": lag} for lag in LAGS},
        "correction": {name: CORRECTIONS[name] for name in CHOSEN},
    },
    panels="correction",
    experiment="examples/reasoning_gym/rl.yaml",
    settings={
        "learner.steps": 80,
        "learner.batch_size": 256,
        "learner.minibatches": 2,
        LR: 2e-5,
        "learner.eval_every": 20,
        "learner.checkpoint_every": 1000,
        "cluster.scorers": 2,
        "scoring.rule_processes": 2,
        "replay.filter.zero_variance": False,
    },
    target=0.2,
    baseline={"correction": "truncate"},
    shown=("last accuracy", "gain", "lag used, mean", "learner idle", "seconds of all steps"),
)

if __name__ == "__main__":
    main(STUDY)
