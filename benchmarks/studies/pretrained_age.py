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

LAGS = ("1", "8", "32")
CHOSEN = ("truncate", "none", "sequence mask", "vespo")
"""The default, no correction, and two of those that gained with each seed at `max_lag=32` in the study `age`, at the
default's learning rate."""

STUDY = Study(
    name="pretrained_age",
    question="Which correction holds at which age of the data, for a pretrained model?",
    factors={
        "max_lag": {lag: {"replay.max_lag": int(lag)} for lag in LAGS},
        "rate": {"2e-5": {LR: 2e-5}, "5e-6": {LR: 5e-6}},
        "correction": {name: CORRECTIONS[name] for name in CHOSEN},
    },
    panels="correction",
    experiment="examples/reasoning_gym/rl.yaml",
    settings={
        "actor.concurrency": 160,
        "engine.slots": 160,
        "learner.steps": 64,
        "learner.batch_size": 256,
        "learner.minibatches": 2,
        "learner.micro_tokens": 8192,
        "learner.eval_every": 16,
        "learner.checkpoint_every": 1000,
        "cluster.scorers": 1,
        "scoring.rule_processes": 2,
        "replay.filter.zero_variance": False,
    },
    target=0.2,
    # The lower rate is for the oldest data, and fresh data hardly need a correction.
    skipped=(
        *({"max_lag": lag, "rate": "5e-6"} for lag in LAGS[:2]),
        *({"max_lag": LAGS[0], "correction": each} for each in CHOSEN[1:]),
    ),
    baseline={"correction": "truncate"},
    shown=("last accuracy", "gain", "lag used, mean", "learner idle", "seconds of all steps"),
)

if __name__ == "__main__":
    main(STUDY)
