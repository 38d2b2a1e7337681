"""Logs metrics for people: one line per step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from asyncrl.observe.metrics import Sink, Value


class Console(Sink):
    """One log line per step, with the numbers only."""

    def __init__(self, role: str) -> None:
        self._log = logging.getLogger(f"asyncrl.{role}")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        numbers = (f"{name}={value:.4g}" for name, value in values.items() if isinstance(value, int | float))
        self._log.info("step %d: %s", step, " ".join(numbers))
