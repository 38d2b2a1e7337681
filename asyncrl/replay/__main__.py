"""`python -m asyncrl.replay`: serve one shard of a run's replay until SIGTERM or Ctrl-C.

A replay that no supervisor started also ends shortly after the learner's last step.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

import zmq

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.machine import process
from asyncrl.machine.activity import Activity, heartbeat
from asyncrl.machine.files import when_there_is_room, write_whole
from asyncrl.machine.ports import listening
from asyncrl.network.keys import server_keys
from asyncrl.network.listener import Listener
from asyncrl.observe.from_config import open_reports
from asyncrl.replay.from_config import open_store, replay_settings
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store.store import ENDPOINT_FILE

log = logging.getLogger("asyncrl.replay")


def run(config: TrainConfig) -> None:
    """Serve until a signal, or until the run is done. If the disk is too full to start, waits for room.

    Raises ConfigError: the port is taken; StoreError: the store cannot be opened.
    """
    stop, activity, network = process.stop_on_signals(), Activity(), config.network
    process.keep_freed_memory()
    gc.freeze()  # Garbage collections skip the loaded modules, which live as long as the process.
    keys, endpoint = (
        server_keys(network.keys),
        locations.replay_endpoints(network, config.replay.shards)[config.replay.shard],
    )
    with heartbeat(activity, config.cluster.hang_timeout_s), ExitStack() as stack:
        open_it = partial(open_store, config.replay, locations.run_dir(config.run))
        store = stack.enter_context(closing(when_there_is_room(open_it, stop, "the store of the replay")))
        listener = listening(
            lambda: Listener(zmq.Context.instance(), endpoint, keys, network.max_message_mb << 20),
            f"network.replay_port={network.replay_port}",
            stop,
        )
        stack.enter_context(closing(listener))
        address = store.path / ENDPOINT_FILE
        # A restarted replay usually has its old address, so nothing must be written. Then it serves at once even if the
        # disk is full, and can tell its clients that the disk is full.
        if not (address.exists() and address.read_text() == endpoint):
            when_there_is_room(lambda: write_whole(address, endpoint), stop, str(address))
        log.info("replay serves %s from %s", endpoint, store.path)
        reports = stack.enter_context(open_reports(config, process.worker_name("replay"), endpoint))
        metrics, spans = reports.metrics(console=False, gpus=False), reports.spans
        service = ReplayService(
            replay_settings(config),
            config.replay.lease_s,
            time.monotonic,
            lambda: listener.failed_handshakes,
            locations.run_identity(config.run, make=True),
            ends=not process.is_supervised(),
            spans=spans,
        )
        ReplayServer(listener.socket, store, service, metrics=metrics, activity=activity, spans=spans).run(stop)
        if not stop.is_set():
            log.info("the run is done: the replay ends")


def main(argv: Sequence[str]) -> int:
    """Run this role with the words of a command line, and return the exit status."""
    return role_main(run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
