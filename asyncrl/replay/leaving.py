"""The orderly end of a worker: it tells the replay, which gives what the worker still holds to others at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from asyncrl.errors import AsyncrlError
from asyncrl.network.keys import ClientKeys
from asyncrl.replay.client import ReplayClient
from asyncrl.types import RunIdentity

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""A shard that does not answer so soon may have ended too. It gives the work to others after replay.lease_s."""


def leave(
    endpoints: Sequence[str], worker: str, incarnation: str, keys: ClientKeys | None, run: RunIdentity | None
) -> None:
    """Tell every shard at once that this start of a worker ends. Call it when the worker has ended its calls. The log
    names a shard that cannot be told."""

    def tell(endpoint: str) -> None:
        with closing(ReplayClient(endpoint, worker, incarnation, give_up_s=ANSWER_S, keys=keys, run=run)) as client:
            try:
                client.leave()
            except AsyncrlError as error:
                log.warning(
                    "the replay gives what %s still holds to others only after replay.lease_s: %s", worker, error
                )

    # One after another, shards that do not answer would hold the end up for their number of times ANSWER_S.
    with ThreadPoolExecutor(len(endpoints)) as threads:
        list(threads.map(tell, endpoints))
