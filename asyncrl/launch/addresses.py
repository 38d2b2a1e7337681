"""Chooses those addresses, ports and keys of a run that the configuration leaves open.

The chosen values are written into the configuration in the run's folder, so that roles and other commands find each
other. When a run resumes, addresses and ports are chosen again: a port may be taken by then, and a role may be on
another host.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.config import locations
from asyncrl.config.bind import is_loopback
from asyncrl.config.option import as_yaml
from asyncrl.config.schema import LearnerConfig, NetworkConfig, RunConfig, TrainConfig
from asyncrl.machine.files import write_whole
from asyncrl.machine.ports import LOOPBACK, claim, free_ports, is_free
from asyncrl.network.keys import check_keys, make_keys

log = logging.getLogger("asyncrl.train")

FILE = "left_open.json"
"""The file in a run's folder with the configuration keys that the launcher set when the run was last started, and the
values that these keys had before."""
KEYS_FOLDER = "keys"

_NETWORK_KEYS = ("replay_host", "replay_port", "learner_host", "weights_port")
_LEARNER_KEYS = ("rendezvous", "interface")


@dataclass(frozen=True, slots=True)
class RunAddresses:
    """The sections of the configuration that say where a run listens. The methods fill in the addresses and ports that
    the configuration does not give."""

    run: RunConfig
    network: NetworkConfig
    learner: LearnerConfig
    shards: int

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the addresses of a run. A value that a method fills in is also set in `config`."""
        return cls(config.run, config.network, config.learner, config.replay.shards)

    @property
    def run_dir(self) -> Path:
        """The folder of the run as an absolute path."""
        return locations.run_dir(self.run).absolute()

    def values(self) -> dict[str, Any]:
        """Return the values of all configuration keys that a launcher may set."""
        network = {f"network.{name}": getattr(self.network, name) for name in _NETWORK_KEYS}
        return network | {f"learner.{name}": getattr(self.learner, name) for name in _LEARNER_KEYS}

    def choose_ports(self) -> None:
        """Choose the ports that are not configured, so that all roles share them. Raises UnavailableError: no port is
        free."""
        self.network.replay_port = self.network.replay_port or free_ports(self.shards)
        self.network.weights_port = self.network.weights_port or free_ports(1)

    @contextmanager
    def usual_ports(self) -> Iterator[None]:
        """Keep the default ports for this run until the block ends. If another program or run has one of them, set both
        ports to 0, so that free ones are chosen. This does nothing if other ports are configured, or if other machines
        can reach the run."""
        network, usual = self.network, NetworkConfig()
        chosen = (network.replay_port, network.weights_port) != (usual.replay_port, usual.weights_port)
        alone = is_loopback(network.replay_address) and is_loopback(network.learner_address)
        if chosen or not alone or self.learner.nodes > 1:
            yield
            return
        ports = [*range(network.replay_port, network.replay_port + self.shards), network.weights_port]
        with ExitStack() as claims:
            for port in ports:
                if (own := claim(port)) is not None:
                    claims.enter_context(own)
                if own is None or not is_free(LOOPBACK, port):
                    log.info("another program has the default port %d, so the run takes free ones", port)
                    network.replay_port = network.weights_port = 0
                    claims.close()
                    break
            yield

    def close_to_others(self) -> None:
        """Make keys for a run that other machines can reach, unless keys are configured or the run may do without
        keys."""
        network = self.network
        alone = is_loopback(network.replay_address) and is_loopback(network.learner_address)
        # gloo and NCCL have no keys, so a learner on several hosts needs `insecure`. Even then all other sockets use
        # keys.
        if alone or network.keys is not None or (network.insecure and self.learner.nodes == 1):
            return
        self.take_keys()

    def take_keys(self) -> None:
        """Use the configured keys, or else the keys in the run's folder, which are made if there are none.

        Raises ConfigError: the keys cannot be used.
        """
        if self.network.keys is None:
            folder = self.run_dir / KEYS_FOLDER
            if not folder.exists():
                make_keys(folder)
                log.info("made keys for this run in %s", folder)
            self.network.keys = str(folder)
        check_keys(self.network.keys)

    def record_left_open(self, given: Mapping[str, Any], settled: Mapping[str, Any]) -> None:
        """Record the configuration keys that the launcher has set, each with the value that it had before. `given` has
        the earlier values of all keys of addresses, and `settled` those of other keys that were set."""
        chosen = self.values()
        left = {**settled, **{key: value for key, value in given.items() if chosen[key] != value}}
        write_whole(self.run_dir / FILE, json.dumps(left))


def words_left_open(run_dir: Path) -> list[str]:
    """Return the command-line words that reset the configuration keys which the launcher set when the run was last
    started. The launcher then chooses their values again."""
    file = run_dir / FILE
    found = json.loads(file.read_text()) if file.exists() else {}
    return [f"{key}={as_yaml(value)}" for key, value in found.items()]
