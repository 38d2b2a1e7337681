"""Before anything starts: whether every name in the configuration stands for something that can be used."""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig


def preflight(config: TrainConfig) -> None:
    """Load keys, tools, rules and the algorithm's parts once, as their roles will. Raises ConfigError with the fix."""
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.algorithms.compose import check
    from asyncrl.network.keys import client_keys, server_keys
    from asyncrl.scoring.rules.registry import load_rules

    server_keys(config.network)
    client_keys(config.network)
    tool_classes(config.actor.tools)
    load_rules(config.scoring.rule, config.scoring.rules)
    check(
        config.algorithm,
        critic=True,
        step_scores=config.scoring.prm is not None or config.implicit.train,
        group_size=config.learner.group_size,
    )
