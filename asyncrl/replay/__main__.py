"""`python -m asyncrl.replay`: serve one shard of the replay of a run until SIGTERM or Ctrl-C.

With a bare word before all else it is a subcommand, which looks into a run: see `inspect.command`.
"""

from __future__ import annotations

import logging
import sys
import time

import zmq

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import UnavailableError
from asyncrl.replay.from_config import open_store, rules
from asyncrl.replay.server import Server
from asyncrl.replay.service import Service

log = logging.getLogger("asyncrl.replay")


def run(config: TrainConfig) -> None:
    """Serve until a signal. Raises UnavailableError: the port is taken; StoreError: the store cannot be opened."""
    stop = process.stop_on_signals()
    store = open_store(config)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = True
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
    arguments = sys.argv[1:]
    # What only people need is imported for them alone: a replay must be up again in a moment.
    if arguments and _is_subcommand(arguments[0]):
        from asyncrl.replay.inspect.command import main as inspect

        inspect(arguments)
    if {"-h", "--help"} & set(arguments):
        from asyncrl.replay.inspect.command import parser

        sys.stdout.write(f"{parser().format_help()}\nWithout a subcommand it serves the replay of a run:\n\n")
    role_main(run)


def _is_subcommand(word: str) -> bool:
    """A bare word; Hydra's arguments begin with a sign or hold a "="."""
    return word[:1].isalpha() and "=" not in word


if __name__ == "__main__":
    main()
