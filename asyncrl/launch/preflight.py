"""Before anything starts: whether every name in the configuration stands for something that can be used."""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig


def preflight(config: TrainConfig) -> None:
    """Load keys, tools, rules, model families and the algorithm's parts once, as their roles will.

    Raises ConfigError, which says how to mend it.
    """
    from asyncrl.actor.door.agent import load_agent
    from asyncrl.actor.steps import find_split
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.algorithms.compose import check
    from asyncrl.network.keys import client_keys, server_keys
    from asyncrl.scoring.models.registry import check_outcome_model, check_prm
    from asyncrl.scoring.rules.registry import load_rules

    server_keys(config.network)
    client_keys(config.network)
    tool_classes(config.actor.tools)
    if config.actor.agent is not None:
        load_agent(config.actor.agent)
    find_split(config.actor.step_split)
    load_rules(config.scoring)
    check_prm(config.scoring.prm, "scoring.prm")
    check_outcome_model(config.scoring.outcome_model, "scoring.outcome_model")
    check(
        config.algorithm,
        critic=True,
        step_scores=(config.scoring.prm.path is not None and not config.scoring.shadow) or config.implicit.train,
        group_size=config.learner.group_size,
    )
