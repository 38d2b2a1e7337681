"""`python -m asyncrl.replay`: serve one shard of the replay of a run until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import time

import zmq

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import UnavailableError
from asyncrl.replay.client import CREDITS
from asyncrl.replay.from_config import open_store, rules
from asyncrl.replay.server import Server
from asyncrl.replay.service import Service

PEER_MESSAGES = 2 * CREDITS
"""Messages that wait for or from one peer; ZeroMQ tells of room only when half of them are read. A slow reader's further
replies are lost, and it asks again."""

log = logging.getLogger("asyncrl.replay")


def run(config: TrainConfig) -> None:
    """Serve until a signal. Raises UnavailableError: the port is taken; StoreError: the store cannot be opened."""
    stop = process.stop_on_signals()
    process.keep_freed_memory()
    store = open_store(config)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = True
    socket.sndhwm = socket.rcvhwm = PEER_MESSAGES
    socket.maxmsgsize = config.network.max_message_mb << 20
    endpoint = process.replay_endpoints(config.network, config.replay.shards)[config.replay.shard]
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise UnavailableError(
            f"cannot listen at {endpoint}: {error}; set network.replay_port to a free port"
        ) from error
    log.info("replay serves %s from %s", endpoint, store.path)
    try:
        Server(socket, store, Service(rules(config), config.replay.lease_s, time.monotonic)).run(stop)
    finally:
        socket.close()
        store.close()


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
