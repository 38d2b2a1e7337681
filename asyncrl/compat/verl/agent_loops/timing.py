"""Helpers that files written for verl's agent loops import: a timer, and a decorator that traces a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds that the body of the `with` statement takes to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def rollout_trace_op(function: Called) -> Called:
    """The function itself: asyncrl records the phases of episodes by its own spans (`observe.spans`)."""
    return function
