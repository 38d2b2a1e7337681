"""How a section states a field."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, meaning: str) -> Any:
    """A field with its meaning; mutable defaults are copied for each instance."""
    metadata = {"meaning": meaning}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
