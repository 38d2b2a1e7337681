"""Says in a few words what a run works at now, also in its quiet phases: starts, evaluations, checkpoints, the end."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.runs.state.situation import RoleNow
from asyncrl.text import duration

SHORT_S = 5.0
"""A phase of the learner that has lasted longer is shown with its duration."""
MOST_NAMES = 3
_PHASES = {
    "load": ("loads the model", ""),
    "wait": ("waits for the batch", " of step {step}"),
    "fetch": ("fetches the batch", " of step {step}"),
    "publish": ("publishes weights", " after step {step}"),
    "checkpoint": ("writes a checkpoint", " after step {step}"),
    "evaluate": ("evaluates the held-out data", ""),
    "export": ("writes the trained model", ""),
    "watch": ("waits for its ranks", ""),
    "end": ("ends", ""),
}
"""The words for each phase of the learner, and those for its step."""
_TRAINS = ("trains", " step {step}")


def does(phase: str, step: int) -> str:
    """The work of a learner in a phase of `step`. A phase without words of its own is a part of the training."""
    return "".join(_PHASES.get(phase, _TRAINS)).format(step=step)


def working(roles: Mapping[str, RoleNow]) -> str:
    """The work of the run: long work of a role with its remaining time, the roles that still start, or the phase of the
    learner. Empty without roles. The step of that phase is left out, since views show the number of finished steps next
    to this text."""
    long = [f"{name} is {role.does.work}" for name, role in roles.items() if role.does and role.does.work]
    if long:
        return f"{long[0]} (and {len(long) - 1} more)" if len(long) > 1 else long[0]
    starting = [name for name, role in roles.items() if role.does is None or role.does.phase == "start"]
    if starting:
        more = f" and {len(starting) - MOST_NAMES} more" if len(starting) > MOST_NAMES else ""
        return f"{', '.join(starting[:MOST_NAMES])}{more} start{'' if len(starting) > 1 else 's'}"
    learner = roles.get("learner")
    if learner is None or learner.does is None:
        return ""
    for_s = f" for {duration(learner.does_s)}" if learner.does_s > SHORT_S else ""
    return f"learner {_PHASES.get(learner.does.phase, _TRAINS)[0]}{for_s}"
