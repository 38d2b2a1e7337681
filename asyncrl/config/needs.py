"""Which kinds of scoring a trajectory passes through, and which of them a scoring process does.

The replay and the scorers both use this file, so that they agree.
"""

from __future__ import annotations

from asyncrl.config.schema.scoring import KINDS, ScoringConfig


def configured(config: ScoringConfig) -> tuple[str, ...]:
    """The kinds that the configuration has: rules always, and the models that it names."""
    named = {"rules": True, "outcome_model": config.outcome_model.path is not None, "prm": config.prm.path is not None}
    return tuple(kind for kind in KINDS if named[kind])


def needs(config: ScoringConfig, data_source: str) -> tuple[str, ...]:
    """The kinds that trajectories of `data_source` pass through, in order."""
    return _in_order(config.needs.get(data_source, KINDS), config)


def serves(config: ScoringConfig) -> tuple[str, ...]:
    """The kinds that a scoring process with this configuration does, in order."""
    return _in_order(config.serve or KINDS, config)


def _in_order(wanted: list[str] | tuple[str, ...], config: ScoringConfig) -> tuple[str, ...]:
    return tuple(kind for kind in configured(config) if kind in wanted)
