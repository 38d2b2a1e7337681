"""Models by family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.scoring.models.base import ProcessRewardModel

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


def load_prm(config: ScoringModelConfig, key: str) -> ProcessRewardModel:
    """The process reward model that the configuration has at `key`. Raises ConfigError."""
    from asyncrl.scoring.models.value_head import load_value_head

    assert config.path
    return load_value_head(config.path, micro_tokens=config.micro_tokens)
