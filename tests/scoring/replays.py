"""A real replay in a thread, whose tasks need what a scoring configuration says."""

import threading
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import zmq

from asyncrl.config.needs import needs
from asyncrl.replay.admission import Admission
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store import Store
from tests.helpers import make_trajectory
from tests.replay.support import make_settings


@contextmanager
def replay_at(folder, config, count, max_attempts):
    """Its endpoint; it takes `count` trajectories."""
    admission = Admission(max_lag=0, per_version=count)
    rules = make_settings(
        admission=admission, batch_size=count, max_attempts=max_attempts, needs=partial(needs, config)
    )
    stop, store = threading.Event(), Store(folder, 1 << 28, durable=False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.router_mandatory = 0, True
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        server = threading.Thread(
            target=ReplayServer(socket, store, ReplayService(rules, 10.0, time.monotonic)).run, args=(stop,)
        )
        server.start()
        yield f"tcp://127.0.0.1:{port}"
        stop.set()
        server.join()
    store.close()


def filled(replay, count):
    """The ids of `count` trajectories that wait to be scored."""
    ids = []
    while len(ids) < count:
        for ticket in replay.tickets([], count):
            replay.put(make_trajectory(ticket, tokens=np.full(8, 97, np.int32)))
            ids.append(ticket.id)
    return ids
