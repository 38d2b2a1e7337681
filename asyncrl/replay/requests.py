"""What the body of each kind of request must hold, checked before anything is done with it.

A handler may then use these fields as they are. Kinds that carry a trajectory or labels are read whole by `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.store import MAX_KEY_BYTES

MAX_VERSION = (1 << 31) - 1
MAX_FETCH = 16
MAX_HOLDING = 1 << 16
MAX_KINDS = 64


@dataclass(frozen=True, slots=True)
class Field:
    """`holds` tells of any plain value whether it will do; `meaning` says what will."""

    meaning: str
    holds: Callable[[Any], bool]


def whole(at_most: int = 1 << 62) -> Field:
    return Field(f"a whole number of 0 to {at_most}", lambda value: type(value) is int and 0 <= value <= at_most)


def names(at_most: int) -> Field:
    """A list of ids."""
    return Field(
        f"a list of up to {at_most} ids",
        lambda value: isinstance(value, list) and len(value) <= at_most and all(map(_is_name, value)),
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_KEY_BYTES and len(value.encode()) <= MAX_KEY_BYTES


NAME = Field(f"an id of 1 to {MAX_KEY_BYTES} bytes", _is_name)
TEXT = Field("text", lambda value: isinstance(value, str))
REASON = Field("text that says why", lambda value: isinstance(value, str) and bool(value.strip()))
FLAG = Field("true or false", lambda value: isinstance(value, bool))
WHO = {"worker": NAME, "incarnation": NAME}

REQUESTS: dict[str, dict[str, Field]] = {
    "tickets": {**WHO, "holding": names(MAX_HOLDING), "waiting": names(MAX_HOLDING), "want": whole()},
    "trajectory": {"id": NAME, "group": NAME},
    "failed": {"ticket": NAME, "reason": TEXT},
    "lease": {**WHO, "serves": names(MAX_KINDS), "trajectories": whole(), "tokens": whole()},
    "renew": {"worker": NAME},
    "labels": {**WHO, "id": NAME},
    "scoring-failed": {**WHO, "id": NAME, "reason": TEXT},
    "plan": {"step": whole()},
    "fetch": {"table": TEXT, "ids": names(MAX_FETCH)},
    "published": {"version": whole(MAX_VERSION)},
    "checkpointed": {"steps": whole(), "kept": whole()},
    "evaluate": {"version": whole(MAX_VERSION)},
    "evaluation": {"version": whole(MAX_VERSION), "wait": FLAG},
    "status": {},
    "audit": {},
    "requeue": {"ticket": NAME},
    "discard": {"ticket": NAME},
    "skip-plan": {"step": whole(), "reason": REASON},
}


def check(kind: str, body: Mapping[Any, Any]) -> None:
    """Raises WireError where a field of a known kind is missing or will not do."""
    for name, field in REQUESTS.get(kind, {}).items():
        if name not in body:
            raise WireError(f"a request {kind!r} must have {name!r}: {field.meaning}")
        if not field.holds(body[name]):
            raise WireError(f"in a request {kind!r} {name!r} must be {field.meaning}, not {body[name]!r:.50}")
