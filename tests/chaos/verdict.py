"""Checks the promises of a run by its store, and by what witnesses and rules saw of it.

Every accepted trajectory is trained, or thrown away and counted, or still there. None is in two plans, and none was too
old when it was planned. Steps that were done twice did the same. The weights are those of an undisturbed training.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from asyncrl.replay.store.records import TrajectoryState
from asyncrl.replay.stored import StoredRun
from tests.chaos.witness import Witness
from tests.chaos.world import MAX_LAG
from tests.end_to_end.support import Run

WAITING = (TrajectoryState.WAITING, TrajectoryState.LEASED, TrajectoryState.LABELLED, TrajectoryState.PLANNED)
COUNTED = (
    TrajectoryState.TRAINED,
    TrajectoryState.EVICTED,
    TrajectoryState.FILTERED,
    TrajectoryState.DROPPED,
    TrajectoryState.DEAD,
)


def judge(run: Run, again: Path, witnesses: Sequence[Witness], judged: Collection[str]) -> dict[str, Any]:
    """The figures of a run in `run.dir` whose plans were trained once more in `again`; `broken` says what is wrong."""
    with closing(StoredRun(run.dir / "replay")) as stored:
        counters, audit = stored.counters(), stored.audit(uses=1)
        known = {name for name in {*judged, *_acknowledged(witnesses)} if stored.record(name).facts is None}
        too_old = over_bound(stored, MAX_LAG)
    states = Counter(audit["states"])
    waiting = sum(states[state] for state in WAITING)
    ended = {state.value: counters[state] for state in COUNTED}
    figures = {
        "acknowledged": counters["accepted"],
        "trained": ended.pop("trained"),
        **ended,
        "waiting": waiting,
        "acknowledged_to_witnesses": len(_acknowledged(witnesses)),
        "lost": audit["lost"] + len(known),
        "trained_twice": audit["trained_twice"],
        "over_bound": too_old,
        "weights_equal": _weights(run.dir) == _weights(again),
    }
    broken = {
        "lost": figures["lost"] > 0,
        "trained twice": figures["trained_twice"] > 0,
        "over the bound": too_old > 0,
        "weights differ": not figures["weights_equal"],
        "planned, but not trained": audit["planned"] != figures["trained"],
        "the equation": figures["acknowledged"] != figures["trained"] + sum(ended.values()) + waiting,
        "counters and states differ": any(states[state] != counters[state] for state in COUNTED),
        "a step did otherwise the second time": bool(_inconstant(run)),
        "promises to witnesses": any(witness.broken_promises for witness in witnesses),
    }
    return {**figures, "steps_repeated": _repeated(run), "broken": [name for name, yes in broken.items() if yes]}


def _acknowledged(witnesses: Sequence[Witness]) -> set[str]:
    return set().union(*(witness.acknowledged for witness in witnesses))


def over_bound(stored: StoredRun, max_lag: int) -> int:
    """The number of trajectories with a trained token above the age bound, by the versions of the tokens."""
    too_old = 0
    for step in range(stored.steps()):
        plan = stored.plan(step)
        assert plan is not None
        # Without masks all sampled tokens are trained. Version 0 is the oldest.
        for name, first in zip(plan.ids, plan.first_trained or [0] * len(plan.ids), strict=True):
            trajectory = stored.trajectory(name)
            assert trajectory is not None, name
            trained = trajectory.versions[trajectory.versions >= first]
            too_old += bool((plan.version - trained > max_lag).any())
    return too_old


def _metrics(run: Run) -> dict[int, list[tuple[float, ...]]]:
    by_step: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for line in run.steps():
        by_step[line["step"]].append((line["loss"], line["grad_norm"], line["tokens"], line["outcome/mean"]))
    return by_step


def _inconstant(run: Run) -> list[int]:
    return [step for step, values in _metrics(run).items() if len(set(values)) > 1]


def _repeated(run: Run) -> int:
    return sum(len(values) - 1 for values in _metrics(run).values())


def _weights(run_dir: Path) -> dict[str, bytes]:
    """The exported weights, and weights and moments of the last checkpoint, as bytes by name."""
    newest = max(mark.parent for mark in (run_dir / "checkpoints").glob("step-*/complete"))
    files = [load_file(path) for path in sorted(newest.glob("*.safetensors"))]
    tensors = {f"{newest.name}.{name}": value for name, value in _whole(files).items()}
    exported = load_file(run_dir / "model" / "model.safetensors")
    tensors |= {f"export.{name}": value for name, value in exported.items()}
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def _whole(files: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the parts of each tensor that several ranks have."""
    parts = {name: [each[name] for each in files if name in each] for name in files[0]}
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}
