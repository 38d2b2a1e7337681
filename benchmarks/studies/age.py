"""Compares corrections on data of several ages: which of them holds at which age?

Each age bound has as many episodes in flight as it admits, (max_lag + 1) batches, so that data become as old as
allowed. `max_lag=0` is synchronous training.

    python -m benchmarks.studies.age --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import BATCH, Search, Settings, Study

LAGS = (0, 1, 2, 4, 8, 16, 32)


def at_lag(max_lag: int) -> Settings:
    in_flight = (max_lag + 1) * BATCH
    return {"replay.max_lag": max_lag, "actor.concurrency": in_flight, "engine.slots": in_flight}


def part(name: str, **params: object) -> list[Settings]:
    return [{"name": name, "params": params}] if params else [{"name": name}]


def correction(*parts: Settings, **settings: object) -> Settings:
    return {"algorithm.correction": list(parts), **{f"algorithm.{key}": value for key, value in settings.items()}}


TRUNCATE = {"name": "truncate", "params": {"level": "token", "cap": 2.0}}
GEOMETRIC = {"name": "truncate", "params": {"level": "geometric", "cap": 2.0}}

CORRECTIONS: dict[str, Settings] = {
    "none": correction(),
    "truncate": correction(TRUNCATE),
    "icepop": correction({"name": "mask", "params": {"level": "token", "low": 0.5, "high": 5.0}}),
    "sequence mask": correction({"name": "mask", "params": {"level": "geometric", "low": 0.9, "high": 1.1}}),
    "m2po": correction({"name": "m2po"}),
    "opsm": correction(TRUNCATE, {"name": "opsm"}),
    "interpolate": correction(TRUNCATE, proximal="interpolate"),
    "ppo": correction(proximal="behaviour"),
    "gspo": correction(
        GEOMETRIC,
        loss={"name": "gspo", "params": {"clip_low": 3e-4, "clip_high": 4e-4}},
        aggregation={"name": "seq-mean-token-mean"},
    ),
    "cispo": correction(TRUNCATE, loss={"name": "cispo"}),
    "dppo": correction(loss={"name": "dppo_tv"}, proximal="behaviour"),
    "luspo": correction(
        GEOMETRIC,
        loss={"name": "gspo", "params": {"clip_low": 2e-3, "clip_high": 2.5e-3}},
        aggregation={"name": "seq-mean-token-sum"},
    ),
    "vespo": correction(loss={"name": "vespo"}, proximal="behaviour"),
    "topr": correction(loss={"name": "topr"}, proximal="behaviour", aggregation={"name": "seq-mean-token-mean"}),
    "oapl": correction(
        advantage={"name": "oapl"},
        loss={"name": "oapl"},
        proximal="behaviour",
        aggregation={"name": "seq-mean-token-mean"},
    ),
    "vaco": correction(TRUNCATE, {"name": "vaco", "params": {"delta": 0.2}}),
    "vtrace": {
        **correction(advantage={"name": "vtrace"}, loss={"name": "gpg"}, proximal="recompute"),
        "algorithm.value": {"name": "clipped", "params": {"clip": None}},
        "critic.lr": 1e-3,
        "critic.shared": False,
    },
    "kpop": correction({"name": "kpop"}),
    "sat": correction(loss={"name": "sat"}),
    "sat gspo": correction(loss={"name": "sat_gspo"}, aggregation={"name": "seq-mean-token-mean"}),
    "lr by ess": correction(TRUNCATE, lr_scale={"name": "ess"}),
    "stable reinforce": correction(
        TRUNCATE, {"name": "outliers"}, advantage={"name": "reinforce_pp"}, loss={"name": "stable_reinforce"}
    ),
}
"""Settings of each correction. A step has two updates, so all but `interpolate`, `ppo`, `dppo`, `vespo`, `topr` and
`oapl` take their ratios to a recomputed policy."""

STUDY = Study(
    name="age",
    question="Which correction holds at which age of the data?",
    factors={"max_lag": {str(lag): at_lag(lag) for lag in LAGS}, "correction": CORRECTIONS},
    panels="correction",
    baseline={"correction": "none"},
    search=Search("correction", rates=(3e-5, 1e-4, 3e-4), at={"max_lag": "4"}),
)

if __name__ == "__main__":
    main(STUDY)
