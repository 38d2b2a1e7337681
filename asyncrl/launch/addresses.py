"""Which addresses of a run its launcher chose. The configuration in the run's folder has them, so that all roles and
other commands find each other; a resume leaves them to the launcher again, since a port may be taken by then, and a
role may be on another host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from asyncrl.config.option import as_yaml
from asyncrl.config.schema import TrainConfig
from asyncrl.machine.files import write_whole

FILE = "left_open.json"
"""The file in a run's folder with the keys that the configuration of its last start left to the launcher."""

_KEYS = (
    *("network.replay_host", "network.replay_port", "network.learner_host", "network.weights_port"),
    *("learner.rendezvous", "learner.interface"),
)


def addresses(config: TrainConfig) -> dict[str, Any]:
    """The values of all keys that a launcher may set."""
    return {key: attrgetter(key)(config) for key in _KEYS}


def record_left_open(run_dir: Path, given: Mapping[str, Any], config: TrainConfig) -> None:
    """Write down which of the values that were `given` the launcher has replaced by those of `config`."""
    chosen = addresses(config)
    write_whole(run_dir / FILE, json.dumps({key: value for key, value in given.items() if chosen[key] != value}))


def words_left_open(run_dir: Path) -> list[str]:
    """The words of a command line that leave to the launcher what the last start of a run left to it."""
    file = run_dir / FILE
    found = json.loads(file.read_text()) if file.exists() else {}
    return [f"{key}={as_yaml(value)}" for key, value in found.items()]
