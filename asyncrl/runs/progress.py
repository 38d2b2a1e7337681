"""Reads the progress of a run from the metrics of its roles, for the run's terminal and for `asyncrl status`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncrl.runs.health.evidence import ACTOR_ROWS, recent_shares
from asyncrl.runs.lines import Row, Tail
from asyncrl.runs.pace import PACE_STEPS, StepPace, pace
from asyncrl.runs.run import Run
from asyncrl.text import duration

ACTORS = "actor-"


class RunProgress:
    """The newest values of a run. With `from_now`, the rows that actors wrote before this object was made are left out,
    since they are from an earlier start."""

    def __init__(self, run: Run, from_now: bool = False) -> None:
        self._run = run
        self.learner, self.evaluation = run.tail("learner", PACE_STEPS), run.tail("evaluation")
        self._actors: dict[str, Tail] = {}
        if from_now:
            self._actors = {name: run.tail(name, ACTOR_ROWS) for name in run.roles(f"{ACTORS}*")}
            for tail in self._actors.values():
                tail.skip()

    def actors(self, roles: Collection[str]) -> list[dict[str, Any]]:
        """The newest values of each actor among the `roles` that has written some."""
        for name in roles:
            if name.startswith(ACTORS) and name not in self._actors:
                self._actors[name] = self._run.tail(name, ACTOR_ROWS)
        found = [tail.read() for name, tail in self._actors.items() if name in roles]
        return [values for values in found if values]

    def values(self, roles: Collection[str]) -> dict[str, Any]:
        """The newest values of the run by name. An unknown value is None. `step` counts the steps that are done.
        `rollout_*` come from the actors among the `roles`. So do `truncated`, the share of the newest episodes that a
        limit ended, and `malformed_calls`, a share of the newest tool calls.
        """
        learner, measured, actors = self.learner.read(), self.evaluation.read(), self.actors(roles)
        rows = [list(tail.recent) for name, tail in self._actors.items() if name in roles and tail.recent]
        idle = [actor.get("idle", 0.0) for actor in actors]
        return {
            "step": learner["step"] + 1 if learner else 0,
            "step_seconds": pace(self.learner.recent, None).step_s,
            "reward": learner.get("reward/mean"),
            "entropy": learner.get("entropy"),
            **newest_shares(rows),
            "held_out_outcome": measured.get("eval/outcome"),
            "held_out_accuracy": measured.get("eval/accuracy"),
            "lag": learner.get("lag/max"),
            "learner_idle": learner.get("idle"),
            "rollout_tokens_per_s": sum(actor.get("tokens_per_s", 0.0) for actor in actors) if actors else None,
            "engine_idle": sum(idle) / len(idle) if idle else None,
        }


def newest_shares(actors: Sequence[Sequence[Row]]) -> dict[str, float | None]:
    """The shares of the newest episodes and tool calls in the rows of each actor, by the names of
    `RunProgress.values`. A share is None if there are no episodes or no calls."""
    found = recent_shares(actors)
    return {"truncated": found.get("truncated"), "malformed_calls": found.get("malformed calls")}


def pace_of(values: Mapping[str, Any], steps: int) -> StepPace:
    """The pace of a run, from the values of `RunProgress`. `steps` are the planned steps."""
    return StepPace(values["step"], steps, values["step_seconds"])


def progress_rows(values: Mapping[str, Any], steps: int) -> list[tuple[str, str]]:
    """Names and formatted values for people. `steps` are the planned steps."""
    held_out = {name: values[f"held_out_{name}"] for name in ("outcome", "accuracy")}
    left_s = pace_of(values, steps).left_s
    return [
        ("step", f"{values['step']}/{steps}"),
        *([("left", duration(left_s))] if left_s else []),
        ("reward", number(values["reward"])),
        *((f"held-out {name}", number(value)) for name, value in held_out.items() if value is not None),
        ("entropy", number(values["entropy"])),
        ("truncated", _share(values["truncated"])),
        *([] if values["malformed_calls"] is None else [("malformed calls", _share(values["malformed_calls"]))]),
        ("lag", number(values["lag"])),
        ("learner idle", _share(values["learner_idle"])),
        ("sampled tokens/s now", number(values["rollout_tokens_per_s"])),
        ("engine idle", _share(values["engine_idle"])),
    ]


def number(value: float | None) -> str:
    """A number in a few characters; a dash for `None`."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
