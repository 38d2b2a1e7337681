"""Checks a configuration after all roles were placed, for `asyncrl train` with and without `--plan`.

The numbers of the learner's ranks and hosts are unknown before the placement. The addresses that other hosts must reach
are unknown, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from asyncrl.config.checks.conflicts import conflicts
from asyncrl.config.refusals import refusal_of
from asyncrl.config.schema import ScoringConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.placement import Placement, settle

OWN, ELSEWHERE = "127.0.0.1", "an address of another host"
PORTS = (5755, 5757)
"""The ports that a plan assumes for the replay and the learner's rendezvous, if the configuration does not give
them."""


def check_settled(config: TrainConfig, placement: Placement) -> None:
    """Raises ConfigError, with a line for each combination that cannot work."""
    combinations = (refusal_of(each, config) for each in conflicts(config))
    if lines := [*combinations, *_without_gpus(config.scoring, config.model.attention, placement)]:
        raise ConfigError("\n".join(lines))


def _without_gpus(scoring: ScoringConfig, attention: str, placement: Placement) -> Iterator[str]:
    """Yield a line for each option that needs a GPU for a role that was placed without one."""

    def lacks(module: str) -> bool:
        roles = placement.of(module)
        return bool(roles) and not any(placement.hosts[each.node].gpus and each.gpus != () for each in roles)

    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        if model.is_configured and model.device.partition(":")[0] == "cuda" and lacks("scoring"):
            yield f"{key}.device={model.device}: no scorer was placed on a GPU; use auto or cpu, or add GPUs"
    if attention not in ("auto", "sdpa") and lacks("learner"):
        yield f"model.attention={attention}: the learner was placed on no GPU, and needs one; use auto"


def check_plan(config: TrainConfig, placement: Placement, one_machine: bool) -> None:
    """Raises ConfigError: `asyncrl train` with this placement would refuse the configuration. `one_machine` is true if
    all hosts are this machine, so that the run listens on loopback addresses."""
    from asyncrl.network.keys import check_keys

    config = copy.deepcopy(config)
    if config.cluster.launcher == "local" and len(placement.hosts) > 1:
        # The local launcher cannot start roles on several hosts. Any other launcher will do: all refuse the same
        # configurations.
        config.cluster.launcher = "hosts"
        config.cluster.hosts = [f"host-{number}" for number in range(len(placement.hosts))]
    settle(config.cluster, config.learner, placement)
    network, learner = config.network, config.learner
    if config.cluster.launcher != "local":
        address = OWN if one_machine else ELSEWHERE
        network.replay_host, network.learner_host = network.replay_host or address, network.learner_host or address
        network.replay_port = network.replay_port or PORTS[0]
        if learner.nodes > 1:
            learner.rendezvous = learner.rendezvous or f"{network.learner_host}:{PORTS[1]}"
    check_settled(config, placement)
    check_keys(network.keys)
