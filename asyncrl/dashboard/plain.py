"""Converts values for a page, so that every browser reads their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

DIGITS = 5


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists, texts and numbers. Numbers keep five digits. Numbers that are not finite become
    texts, since JSON lacks them. Of bytes, such as an image's, only their number is shown."""
    match value:
        case None | bool() | str() | int():
            return value
        case float() | np.floating():
            return _number(float(value))
        case np.integer():
            return int(value)
        case np.bool_():
            return bool(value)
        case bytes():
            return f"{len(value)} bytes"
        case np.ndarray():
            return plain(value.tolist())
        case Mapping():
            return {str(name): plain(inner) for name, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(inner) for inner in value]
    return str(value)


def _number(value: float) -> float | str:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
