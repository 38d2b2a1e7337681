"""Makes the settings of the learner's hosts from the configuration."""

from __future__ import annotations

import hashlib
import json

from asyncrl.config import locations
from asyncrl.config.changes import is_of_run, values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.learner.ranks.hosts import HostSettings


def host_settings(config: TrainConfig) -> HostSettings:
    """Return the settings of this host of the learner, which is one of several."""
    learner = config.learner
    assert learner.rendezvous is not None
    alike = {key: json.dumps(value, sort_keys=True) for key, value in values_of(config).items() if is_of_run(key)}
    return HostSettings(
        node=learner.node,
        nodes=learner.nodes,
        ranks=config.cluster.ranks,
        rendezvous=learner.rendezvous,
        interface=learner.interface,
        keys=config.network.keys,
        folder=locations.run_dir(config.run),
        digests={key: hashlib.sha256(value.encode()).hexdigest() for key, value in alike.items()},
    )
