"""What a command looks into: the stores of a run, what its configuration says, and the replay that serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config import locations
from asyncrl.config.schema import NetworkConfig, TrainConfig
from asyncrl.errors import ConfigError, RefusedError, StoreError, UnavailableError
from asyncrl.machine import process
from asyncrl.network.keys import client_keys
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.stored import StoredRun

T = TypeVar("T")

RUNS = Path("runs")
CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """`folder` holds the stores. `config` is None where nobody wrote it down: `asyncrl train` does. `endpoints` are the
    addresses of the replay's shards, if they are known, and `keys` is the folder of the keys to connect with."""

    folder: Path
    config: TrainConfig | None
    endpoints: Sequence[str] = ()
    keys: str | None = None


def find(run: str | None, store: str | None, endpoints: Sequence[str] = (), keys: str | None = None) -> Target:
    """The target that a command line names, by its run or by its store; `endpoints` and `keys` where they differ from
    the configuration's. Raises ConfigError: none is named; StoreError: it is not there.
    """
    if run is None and store is None:
        raise ConfigError(f"name the run by --run, or its store by --store{_known_runs()}")
    folder = Path(store) if store is not None else _run_folder(str(run)) / "replay"
    if not folder.is_dir():
        raise StoreError(f"there is no store {folder}: name a run by --run runs/NAME{_known_runs()}")
    path = folder.parent / CONFIG
    config = read_config(path) if folder.name == "replay" and path.is_file() else None
    return Target(folder, config, endpoints or _endpoints(config), keys or (config.network.keys if config else None))


def _run_folder(run: str) -> Path:
    return Path(run) if Path(run).is_dir() else RUNS / run


def _known_runs() -> str:
    found = sorted(str(path.parent) for path in RUNS.glob("*/replay"))
    return f"; there are {', '.join(found)}" if found else ""


def read_config(path: Path) -> TrainConfig:
    """The configuration that a run wrote down. Raises ConfigError: it is that of another version of asyncrl."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(path)))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} was written by another version of asyncrl ({reason}): inspect it with that"
        ) from error
    assert isinstance(config, TrainConfig)
    return config


def _endpoints(config: TrainConfig | None) -> list[str]:
    known = config is not None and config.network.replay_port > 0
    return locations.replay_endpoints(config.network, config.replay.shards) if config and known else []


class Live:
    """The replay that serves the stores of `stored`, asked anew for each question."""

    def __init__(self, target: Target, stored: StoredRun, give_up_s: float) -> None:
        self._target = target
        self._identities = stored.each(lambda tx: tx.identity)
        self._runs = stored.each(lambda tx: tx.run)
        self._give_up_s = give_up_s

    def ask(self, shard: int, what: Callable[[ReplayClient], T]) -> T:
        """What the replay of a shard says. Raises UnavailableError: it does not run, or another run's is there;
        ConfigError: the keys to ask it cannot be read."""
        endpoints = self._target.endpoints
        if shard >= len(endpoints):
            raise UnavailableError(
                f"nobody wrote down where the replay of {self._target.folder} listens (`asyncrl train` does): "
                "name each shard's address by --endpoint tcp://HOST:PORT"
            )
        client = ReplayClient(
            endpoints[shard],
            process.worker_name("inspect"),
            process.incarnation(),
            give_up_s=self._give_up_s,
            keys=client_keys(NetworkConfig(keys=self._target.keys)),
            run=self._runs[shard],
        )
        with closing(client):
            another = f"the replay at {endpoints[shard]} serves another run than {self._target.folder}"
            try:
                status = client.status()
            except RefusedError as error:
                raise UnavailableError(f"{another}: {error}") from error
            if status.get("identity") != self._identities[shard]:
                raise UnavailableError(another)
            return what(client)

    def statuses(self) -> tuple[list[dict[str, Any]], str]:
        """The status of every shard that answers, and why the others do not."""
        found, problems = [], []
        for shard in range(len(self._identities)):
            try:
                found.append(self.ask(shard, ReplayClient.status))
            except (UnavailableError, ConfigError) as error:
                problems.append(str(error))
        # Shards that nobody wrote down share one reason.
        return found, "; ".join(dict.fromkeys(problems))
