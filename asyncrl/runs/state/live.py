"""Sends requests to the replay that serves a run's stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from asyncrl.errors import ConfigError, RefusedError, UnavailableError
from asyncrl.machine import process
from asyncrl.network.keys import client_keys
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.store.store import in_use
from asyncrl.replay.stored import StoredRun, shard_paths
from asyncrl.runs.run import Run

T = TypeVar("T")


class LiveReplay:
    """The replay that serves the stores of `stored`. Each call opens a connection, and fails if there is no answer
    within `give_up_s` seconds.

    By default it uses the addresses that the shards wrote, and the keys of the run's configuration. `endpoints` and
    `keys` replace these.
    """

    def __init__(
        self,
        run: Run,
        stored: StoredRun,
        give_up_s: float,
        endpoints: Sequence[str] = (),
        keys: str | None = None,
    ) -> None:
        self.shards = stored.shards
        self._store = run.store
        self._endpoints = endpoints or run.endpoints()
        settings = run.settings()
        self._keys = keys or (settings.keys if settings else None)
        self._identities = stored.each(lambda tx: tx.identity)
        self._owners = stored.each(lambda tx: tx.run)
        self._give_up_s = give_up_s

    def call(self, shard: int, request: Callable[[ReplayClient], T]) -> T:
        """Call `request` with a client of a shard's replay, and return its answer.

        Raises UnavailableError: the replay does not run, or the address belongs to another run; ConfigError: the keys
        cannot be read.
        """
        path = shard_paths(self._store)[shard]
        if not in_use(path):
            raise UnavailableError(f"no replay serves {path}: start the run, then try again")
        if shard >= len(self._endpoints):
            raise UnavailableError(
                f"the address of the replay of {self._store} is not known (a replay writes it into the folder "
                "of its store): name each shard's address with --endpoint tcp://HOST:PORT"
            )
        endpoint = self._endpoints[shard]
        client = ReplayClient(
            endpoint,
            process.worker_name("inspect"),
            process.incarnation(),
            give_up_s=self._give_up_s,
            keys=client_keys(self._keys),
            run=self._owners[shard],
        )
        with closing(client):
            another = f"the replay at {endpoint} serves another run than {self._store}"
            try:
                status = client.status()
            except RefusedError as error:
                raise UnavailableError(f"{another}: {error}") from error
            if status.get("identity") != self._identities[shard]:
                raise UnavailableError(another)
            return request(client)

    def statuses(self) -> tuple[list[dict[str, Any] | None], str]:
        """Ask all shards for their status at once, which takes as long as the slowest shard. The status of a shard that
        does not answer is `None`, and the text has the reasons."""

        def ask(shard: int) -> tuple[dict[str, Any] | None, str]:
            try:
                return self.call(shard, ReplayClient.status), ""
            except (UnavailableError, ConfigError) as error:
                return None, str(error)

        with ThreadPoolExecutor(self.shards) as threads:
            asked = list(threads.map(ask, range(self.shards)))
        # Shards without an address have the same reason, which is shown once.
        problems = dict.fromkeys(problem for _, problem in asked if problem)
        return [status for status, _ in asked], "; ".join(problems)
