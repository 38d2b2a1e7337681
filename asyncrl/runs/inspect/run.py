"""The run that a command looks at: its stores, its configuration, its tokenizer, and the replay that serves it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config.locations import CONFIG_FILE, refuse_fine_tuning
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, RefusedError, StoreError, UnavailableError
from asyncrl.machine import process
from asyncrl.machine.owner import owner_of
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.network.keys import client_keys
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.store import ENDPOINT_FILE, in_use
from asyncrl.replay.stored import StoredRun, shard_paths

log = logging.getLogger(__name__)

T = TypeVar("T")
Decode = Callable[[list[int]], str]

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class InspectedRun:
    """`folder` holds the stores. `config` is None without a file of it; `asyncrl train` writes one. `endpoints` are the
    addresses of the replay's shards, where they are known: each shard writes its own beside its store. `keys` is the
    folder of the keys to connect with."""

    folder: Path
    config: TrainConfig | None
    endpoints: Sequence[str] = ()
    keys: str | None = None


def find(
    run: str | None,
    store: str | None,
    endpoints: Sequence[str] = (),
    keys: str | None = None,
    config: TrainConfig | None = None,
) -> InspectedRun:
    """The run that a command line names, by its folder or by its store. `endpoints` and `keys` replace those of the
    configuration, and `config` is that one where it has been read already.

    Raises ConfigError: neither is named, or the run is a fine-tuning; StoreError: it does not exist.
    """
    if run is None and store is None:
        raise ConfigError(f"name the run, such as runs/NAME, or its store by --store{_known_runs()}")
    named = Path(run or "")
    in_runs = len(named.parts) == 1 and not named.is_dir()
    folder = Path(store) if store is not None else (RUNS / named if in_runs else named) / "replay"
    if not folder.is_dir():
        refuse_fine_tuning(folder.parent)
        if owner_of(folder.parent) is not None:
            raise StoreError(
                f"{folder.parent} starts: its replay has no store yet; look again in a moment, and see "
                f"{folder.parent / 'logs'}"
            )
        if store is not None:
            raise StoreError(f"there is no store {folder}: name one, such as runs/NAME/replay{_known_runs()}")
        if (folder.parent / CONFIG_FILE).is_file():
            logs = folder.parent / "logs"
            see = f"; see {logs}" if logs.is_dir() else ""
            raise StoreError(f"there is no store {folder}: it was never made, or has been removed{see}")
        raise StoreError(f"{run} is no run: name the folder of one, such as runs/NAME, or its name{_known_runs()}")
    path = folder.parent / CONFIG_FILE
    if config is None and folder.name == "replay" and path.is_file():
        config = read_config(path)
    if config is not None:
        keys = keys or config.network.keys
    return InspectedRun(folder, config, endpoints or _endpoints(folder), keys)


def _endpoints(folder: Path) -> list[str]:
    """The addresses that the shards wrote when they started; none if one is missing."""
    with suppress(StoreError, FileNotFoundError):
        return [(path / ENDPOINT_FILE).read_text() for path in shard_paths(folder)]
    return []


def _known_runs() -> str:
    found = sorted(str(path.parent) for path in RUNS.glob("*/replay"))
    return f"; there are {', '.join(found)}" if found else ""


def find_run(name: str) -> Path | None:
    """The folder of the run that `name` names, by its folder or by its name in runs/; None: this is no run."""
    return next((folder for folder in (Path(name), RUNS / name) if (folder / CONFIG_FILE).is_file()), None)


def starting_run(name: str) -> Path | None:
    """The folder of the run that `name` names and a process starts right now; None: there is none."""
    return next((folder for folder in (Path(name), RUNS / name) if owner_of(folder) is not None), None)


def require_run(name: str) -> Path:
    """The folder of a run. Raises ConfigError: there is none, or no training has started in it."""
    folder = find_run(name)
    if folder is None:
        if starting := starting_run(name):
            raise ConfigError(f"{starting} is starting and has no {CONFIG_FILE} yet: ask again once its roles run")
        known = sorted(str(path.parent) for path in RUNS.glob(f"*/{CONFIG_FILE}"))
        there = f"; there are {', '.join(known)}" if known else ""
        raise ConfigError(f"{name} is no run: name the folder of one, which has a {CONFIG_FILE}{there}")
    return folder


def read_config(path: Path) -> TrainConfig:
    """The configuration in a run's folder. Raises ConfigError: another version of asyncrl wrote it, or it is
    damaged."""
    try:
        written = OmegaConf.load(path)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), written))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is of another version of asyncrl ({reason}): inspect it with that one") from error
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    assert isinstance(config, TrainConfig)
    return config


class ConfigFile:
    """The configuration file of a run, for who looks again and again: it is parsed anew only where it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parsed: tuple[tuple[int, int, int], TrainConfig] | None = None

    def read(self) -> TrainConfig | None:
        """None: there is no file. Raises ConfigError as `read_config` does; OSError."""
        if not self._path.is_file():
            return None
        status = self._path.stat()
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if self._parsed is None or self._parsed[0] != state:
            self._parsed = state, read_config(self._path)
        return self._parsed[1]


class LiveReplay:
    """The replay that serves the stores of `stored`. Each call connects anew, and fails after `give_up_s`."""

    def __init__(self, run: InspectedRun, stored: StoredRun, give_up_s: float) -> None:
        self.shards = stored.shards
        self._run = run
        self._identities = stored.each(lambda tx: tx.identity)
        self._owners = stored.each(lambda tx: tx.run)
        self._give_up_s = give_up_s

    def call(self, shard: int, request: Callable[[ReplayClient], T]) -> T:
        """The answer of a shard's replay. Raises UnavailableError: it does not run, or the address belongs to another
        run; ConfigError: the keys cannot be read."""
        endpoints, path = self._run.endpoints, shard_paths(self._run.folder)[shard]
        if not in_use(path):
            raise UnavailableError(f"no replay serves {path}: start the run, then try again")
        if shard >= len(endpoints):
            raise UnavailableError(
                f"the address of the replay of {self._run.folder} is not known (a replay writes it beside its store): "
                "name each shard's address by --endpoint tcp://HOST:PORT"
            )
        client = ReplayClient(
            endpoints[shard],
            process.worker_name("inspect"),
            process.incarnation(),
            give_up_s=self._give_up_s,
            keys=client_keys(self._run.keys),
            run=self._owners[shard],
        )
        with closing(client):
            another = f"the replay at {endpoints[shard]} serves another run than {self._run.folder}"
            try:
                status = client.status()
            except RefusedError as error:
                raise UnavailableError(f"{another}: {error}") from error
            if status.get("identity") != self._identities[shard]:
                raise UnavailableError(another)
            return request(client)

    def statuses(self) -> tuple[list[dict[str, Any] | None], str]:
        """The status of every shard, None for one that does not answer, and the reasons of those. All are asked at
        once: a look takes no longer than the slowest of them."""

        def ask(shard: int) -> tuple[dict[str, Any] | None, str]:
            try:
                return self.call(shard, ReplayClient.status), ""
            except (UnavailableError, ConfigError) as error:
                return None, str(error)

        with ThreadPoolExecutor(self.shards) as threads:
            asked = list(threads.map(ask, range(self.shards)))
        # Shards without an address share one reason.
        problems = dict.fromkeys(problem for _, problem in asked if problem)
        return [status for status, _ in asked], "; ".join(problems)


def ids_as_text(ids: list[int]) -> str:
    """Tokens without a tokenizer."""
    return "".join(f"{each} " for each in ids)


def decoder(run: InspectedRun, path: str | None) -> Decode:
    """Token ids to text, with the tokenizer in `path` or else the run's own: beside its trained policy, or that of
    model.path. Nothing is downloaded. Without a tokenizer it shows ids, and logs why.

    Raises ConfigError: `path` has no tokenizer.
    """
    if path is not None:
        return _decode_by(ModelConfig(path))
    if run.config is None:
        log.warning("token ids instead of text: there is no configuration of the run; name a tokenizer by --tokenizer")
        return ids_as_text
    exported, model = run.folder.parent / "model", run.config.model
    try:
        own = ModelConfig(str(exported), trust_remote_code=model.trust_remote_code) if exported.is_dir() else model
        return _decode_by(own)
    except ConfigError as error:
        log.warning("token ids instead of text: %s", error)
        return ids_as_text


def _decode_by(model: ModelConfig) -> Decode:
    try:
        tokenizer = open_tokenizer(model, local_only=True)
    except ConfigError as error:
        raise ConfigError(f"this machine has no tokenizer {model.path}; name another folder by --tokenizer") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
