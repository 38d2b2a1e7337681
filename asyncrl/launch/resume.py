"""Whether a run may resume in its folder: its configuration must be the same, except for resumable options."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.keys import option_of
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.machine.files import write_whole

RESUMABLE_SECTIONS = {"cluster", "network", "observe", "engine", "weights"}
"""The sections whose options all may change while a run is stopped. Options elsewhere say so themselves."""


def claim(config: TrainConfig, run_dir: Path) -> bool:
    """Write the run's configuration into its folder; True if the folder holds an earlier part of the same run.

    Raises ConfigError, which names the keys that differ: the folder belongs to a run with another configuration.
    """
    path, now = run_dir / "config.yaml", asdict(config)
    resumed = path.exists()
    if resumed:
        before, after = _by_key(yaml.safe_load(path.read_text())), _by_key(now)
        keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        changed = [key for key in keys if not _is_resumable(key)]
        if changed:
            lines = "\n".join(f"  {key}: {before.get(key)} then, {after.get(key)} now" for key in changed)
            raise ConfigError(
                f"{run_dir} holds a run with another configuration:\n{lines}\n"
                "set these back to resume it, or give this run another run.name"
            )
    write_whole(path, yaml.safe_dump(now, sort_keys=False))
    return resumed


def _is_resumable(key: str) -> bool:
    option = option_of(key)
    return key.split(".")[0] in RESUMABLE_SECTIONS or (option is not None and option.resumable)


def _by_key(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat.update(_by_key(value, f"{key}.") if isinstance(value, dict) and value else {key: value})
    return flat
