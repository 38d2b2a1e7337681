"""Measures what reuse of groups, the order of sampling and the choice of groups do to samples and time.

`samples` counts each use of a trajectory. With r uses only one sample of r was generated.

    python -m benchmarks.studies.reuse --seeds 3
"""

from __future__ import annotations

from benchmarks.studies.command import main
from benchmarks.studies.study import Study

STUDY = Study(
    name="reuse",
    question="What do reuse of groups, the order of sampling and the choice of groups do to samples and time?",
    factors={
        "times": {str(times): {"replay.sampler.max_times_sampled": times} for times in (1, 2, 4, 8)},
        "sampler": {kind: {"replay.sampler.kind": kind} for kind in ("fifo", "freshest", "prioritised")},
        "groups": {
            "all": {},
            "filtered": {"replay.filter.zero_variance": True, "replay.oversample": 1.5},
            "evicted again": {"replay.reissue_evicted": True},
        },
    },
    panels="groups",
    settings={"replay.max_lag": 8},
    baseline={"times": "1", "sampler": "fifo", "groups": "all"},
    # The choice of groups is varied with one use and the sampler fifo, the sampler with one use and with four.
    skipped=[
        *({"groups": groups, "times": times} for groups in ("filtered", "evicted again") for times in ("2", "4", "8")),
        *({"groups": groups, "sampler": kind} for groups in ("filtered", "evicted again") for kind in ("freshest",)),
        *({"groups": groups, "sampler": "prioritised"} for groups in ("filtered", "evicted again")),
        *({"sampler": kind, "times": times} for kind in ("freshest", "prioritised") for times in ("2", "8")),
    ],
)

if __name__ == "__main__":
    main(STUDY)
