"""The start renders the demonstrations of `algorithm.sft`, which the learner reads as tokens."""

from __future__ import annotations

import threading

from asyncrl.config.schema import TrainConfig


def check_demonstrations(config: TrainConfig, stop: threading.Event | None = None) -> None:
    """Render them into the run's folder, unless it has them. Raises DataError, ConfigError and StoppedError as
    `prepare_demonstrations`."""
    if config.algorithm.sft.path:
        from asyncrl.actor.demonstrations import prepare_demonstrations

        prepare_demonstrations(config, config.algorithm.sft.path, stop)
