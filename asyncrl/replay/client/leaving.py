"""Tells the replay that a worker ends, so that the replay gives the worker's work to other workers at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from asyncrl.errors import AsyncrlError
from asyncrl.network.keys import ClientKeys
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import RunIdentity

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""The longest wait for a shard, which may have ended too. A shard that was not told gives the work away after
replay.lease_s."""


def leave(
    endpoints: Sequence[str], worker: str, incarnation: str, keys: ClientKeys | None, run: RunIdentity | None
) -> None:
    """Tell all shards at the same time that this `incarnation` (process) of a worker ends. Call this after the worker's
    last request. Logs a warning for a shard that does not answer."""

    def tell(endpoint: str) -> None:
        with closing(ReplayClient(endpoint, worker, incarnation, give_up_s=ANSWER_S, keys=keys, run=run)) as client:
            try:
                client.leave()
            except AsyncrlError as error:
                log.warning(
                    "the replay gives the work of %s to other workers only after replay.lease_s: %s", worker, error
                )

    # If the shards were told one after another, n shards that do not answer would delay the end by n * ANSWER_S.
    with ThreadPoolExecutor(len(endpoints)) as threads:
        list(threads.map(tell, endpoints))
