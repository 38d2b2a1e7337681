"""`python -m asyncrl.replay`: serve the replay of a run until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import zmq

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.data.reading import read_tasks
from asyncrl.network.keys import server_keys
from asyncrl.network.sockets import listen
from asyncrl.replay.admission import Admission
from asyncrl.replay.feed import Feed
from asyncrl.replay.groups import Rules
from asyncrl.replay.server import Server
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store

log = logging.getLogger("asyncrl.replay")

HIGH_WATER = 0.8


def rules(config: TrainConfig) -> Rules:
    """The replay's rules as the configuration has them."""
    learner, replay = config.learner, config.replay
    return Rules(
        admission=Admission(replay.max_lag, learner.batch_size * learner.publish_every),
        feed=Feed(read_tasks(config.data.train), config.run.seed, config.data.shuffle),
        held_out=read_tasks(config.data.eval) if config.data.eval else (),
        group_size=learner.group_size,
        batch_size=learner.batch_size,
        publish_every=learner.publish_every,
        max_attempts=replay.max_attempts,
        temperature=config.actor.temperature,
        high_water_bytes=int(replay.max_store_gb * HIGH_WATER * 1e9),
        greedy_sibling=config.algorithm.greedy_sibling,
    )


def run(config: TrainConfig) -> None:
    """Serve until a signal. Raises UnavailableError: the port is taken; StoreError: the store cannot be opened."""
    stop = process.stop_on_signals()
    network, endpoint = config.network, process.replay_endpoint(config.network)
    keys = server_keys(network)
    store = Store(
        process.run_dir(config.run) / "replay",
        int(config.replay.max_store_gb * 1e9),
        durable=config.replay.durability == "fsync",
    )
    try:
        listener = listen(zmq.Context.instance(), endpoint, keys, network.max_message_mb << 20)
        log.info("replay serves %s from %s", endpoint, process.run_dir(config.run) / "replay")
        with closing(listener):
            service = Service(rules(config), config.replay.lease_s, time.monotonic, lambda: listener.strangers)
            Server(listener.socket, store, service).run(stop)
    finally:
        store.close()


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
