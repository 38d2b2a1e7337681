"""docs/metrics.md, made from the registry: `python -m asyncrl.observe.registry.page FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from asyncrl.observe.registry import BY_WRITER, EVERY_FILE
from asyncrl.observe.registry.metric import Metric

HEAD = """# Metrics

Each role writes its metrics into `runs/NAME/metrics/` as JSON lines, one row per line. The columns are numbers, and a
few texts. pandas reads them; asyncrl does not install it (`pip install pandas`):

<!-- not run here: it needs pandas and a run -->
```python
import pandas

steps = pandas.read_json("runs/demo/metrics/learner.jsonl", lines=True)
steps.plot("step", ["reward/mean", "lag/mean"])
```

A learner that resumes removes the rows of the steps that it trains again, so that each step has one row. All other
roles append. `observe.sinks` sends the same values to other tools ([watching.md](watching.md)).

A *gauge* goes up and down. A *counter* only grows. "Since the start" means since the process started: after a restart
the counter begins at 0. The replay's counters are for the whole run, unless their meaning says "since the start".
*Text* is for people.

An *outcome* is the score of the first rule, mostly 0 or 1. A *reward* is the value that the algorithm uses: the
weighted sum of all parts ([scoring.md](scoring.md)). Words in capital letters stand for a name or a number. If the
unit is *share*, the value is a fraction, mostly from 0 to 1: the share of the things that the meaning names. The *lag*
of a token is the learner's version minus the version that sampled the token. The lag of a trajectory is the largest lag
of its tokens. [concepts.md](concepts.md#the-terms) explains the other terms, such as ticket, lease and plan.

Formulas use the symbols of [algorithms.md](algorithms.md). `mu` is the behaviour policy, which sampled a token.
`pi_prox` is the proximal policy (by default the policy at the start of the step), and w = pi_prox / mu is the raw
importance weight. *Kept* tokens are the sampled
tokens that neither a correction nor a grammar drops.

A KL divergence from one policy to another is estimated from the ratio r of the second policy's probability to the
first policy's. The estimate k1 is the mean of -log r, and k3 is the mean of r - 1 - log r.

This page is generated from `asyncrl/observe/registry/`; `make docs` writes it. In Python,
`asyncrl.observe.registry.describe("learner", "lag/3")` returns the kind, the unit and the meaning of a metric.
"""

USAGE = """The columns `usage/` report the use of the machine, sampled once a second: processors and memory of the
role's process and its children, and the GPUs that the process sees. The servers that an actor started are children. The
learner measures the process of its rank 0, and all GPUs that rank 0 sees on its host. A scorer for several shards of
the replay writes these columns only to the file of the first shard. The GPUs are the ones in CUDA_VISIBLE_DEVICES, or
all GPUs of the machine. `evaluation.jsonl` has none of these columns, and a replay has no GPU columns. NVIDIA's driver
does not report the utilisation of a part of a GPU (MIG)."""

SECTIONS = {
    "learner": ("learner.jsonl", "This file has one row per learner step. `step` is the learner step, from 0."),
    "evaluation": (
        "evaluation.jsonl",
        "This file has one row per evaluation. `step` is the number of steps that trained the measured weights.",
    ),
    "actor": (
        "actor-N.jsonl",
        "This file has a row about every 5 s. `step` is the version that the engine serves. Times of an episode are "
        "means over the episodes since the last row.",
    ),
    "scoring": (
        "scoring-N.jsonl",
        "This file has a row about every 5 s. `step` is the number of trajectories labelled so far. Means are over the "
        "episodes whose final labels came since the last row.",
    ),
    "replay": (
        "replay.jsonl, or replay-SHARD.jsonl",
        "This file has a row about every 5 s. `step` is the newest published version.",
    ),
}
"""The title of each writer's files, and the meaning of a row in these files."""


def page() -> str:
    """The whole page."""
    sections = (f"\n## {title}\n{rows}\n\n{_table(BY_WRITER[writer])}" for writer, (title, rows) in SECTIONS.items())
    return f"{HEAD}\n## All files\n{USAGE}\n\n{_table(EVERY_FILE)}{''.join(sections)}"


def _table(metrics: Iterable[Metric]) -> str:
    head = "| metric | kind | unit | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.meaning} |\n" for metric in metrics
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
