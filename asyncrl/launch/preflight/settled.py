"""What a start refuses of a configuration once all roles have their places; a plan refuses the same.

Before that, nobody knows how many ranks the learner has, on how many hosts, and which addresses others must reach.
"""

from __future__ import annotations

import copy

from asyncrl.config.checks import conflicts
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.placement import Placement, settle

OWN, ELSEWHERE = "127.0.0.1", "an address of another host"
PORTS = (5755, 5757)
"""Of the replay and the learner's rendezvous, where a start chooses them."""


def check_settled(config: TrainConfig) -> None:
    """Raises ConfigError, with a line for each combination that cannot be."""
    if lines := list(conflicts(config)):
        raise ConfigError("\n".join(lines))


def check_plan(config: TrainConfig, placement: Placement, one_machine: bool) -> None:
    """Raises ConfigError: a start with this placement would refuse the configuration. `one_machine`: all of its hosts
    are one, so that a start listens on loopback addresses."""
    from asyncrl.network.keys import check_keys

    config = copy.deepcopy(config)
    if config.cluster.launcher == "local" and len(placement.hosts) > 1:
        # Another launcher will have to start these, and all of them refuse the same.
        config.cluster.launcher = "hosts"
        config.cluster.hosts = [f"host-{number}" for number in range(len(placement.hosts))]
    settle(config, placement)
    network, learner = config.network, config.learner
    if config.cluster.launcher != "local":
        address = OWN if one_machine else ELSEWHERE
        network.replay_host, network.learner_host = network.replay_host or address, network.learner_host or address
        network.replay_port = network.replay_port or PORTS[0]
        if learner.nodes > 1:
            learner.rendezvous = learner.rendezvous or f"{network.learner_host}:{PORTS[1]}"
    check_settled(config)
    check_keys(network)
