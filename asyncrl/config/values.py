"""Values by their dotted keys, and the refusal of one."""

from __future__ import annotations

from typing import Any

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError


def value(config: TrainConfig, key: str) -> Any:
    """The value at a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def require(condition: bool, config: TrainConfig, key: str, fix: str) -> None:
    """Raises ConfigError, which names the key, its value and the fix, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}={value(config, key)}: {fix}")
