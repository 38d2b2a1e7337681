"""Scorers of several kinds against a real replay, killed at random: every trajectory is labelled exactly once."""

import os
import random
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count

import numpy as np
import pytest
import zmq

from asyncrl.config.needs import needs
from asyncrl.replay.admission import Admission
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.server import Server
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store
from tests.helpers import make_trajectory, until
from tests.replay.support import make_rules
from tests.scoring.mortal_scorer import CONFIG

COUNT, MORTAL = 200, 8
KINDS = ["rules", "outcome_model,prm", "rules,outcome_model,prm"]


@pytest.fixture
def endpoint(tmp_path):
    """A replay in a thread, whose tasks need all three kinds."""
    rules = make_rules(
        admission=Admission(max_lag=0, per_version=COUNT),
        batch_size=COUNT,
        max_attempts=1000,
        needs=partial(needs, CONFIG),
    )
    stop, store = threading.Event(), Store(tmp_path, 1 << 28, durable=False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.router_mandatory = 0, True
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        server = threading.Thread(target=Server(socket, store, Service(rules, 10.0, time.monotonic)).run, args=(stop,))
        server.start()
        yield f"tcp://127.0.0.1:{port}"
        stop.set()
        server.join()
    store.close()


def test_every_trajectory_is_labelled_exactly_once_however_scorers_die(endpoint):
    lives, chance = count(), random.Random(0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(worker):
        life = next(lives)
        life_s = chance.uniform(0.05, 0.3) if life < MORTAL else 0
        arguments = [endpoint, f"scorer-{worker}", str(life), KINDS[worker], str(life_s)]
        return subprocess.Popen([sys.executable, "-m", "tests.scoring.mortal_scorer", *arguments], env=environment)

    def all_labelled():
        for worker, scorer in enumerate(scorers):
            if scorer.poll() is not None:
                scorers[worker] = start(worker)
        return replay.status()["labelled"] == COUNT

    scorers = [start(worker) for worker in range(len(KINDS))]
    replay = ReplayClient(endpoint, "test", "1", give_up_s=30.0)
    try:
        ids = []
        while len(ids) < COUNT:
            for ticket in replay.tickets([], COUNT):
                replay.put(make_trajectory(ticket, tokens=np.full(8, 97, np.int32)))
                ids.append(ticket.id)
        until(all_labelled, 60)
        labels = replay.labels(ids)
        status = replay.status()
    finally:
        for scorer in scorers:
            scorer.kill()
            scorer.wait()
        replay.close()
    assert (status["labelled"], status["scoring_failures"]) == (COUNT, 0)
    assert next(lives) > len(KINDS)
    assert status["leases_redelivered"] > 0
    assert {each.scorer for each in labels} == {"exact_match+outcome@1+fake@1"}
    assert {(each.reward, each.outcome) for each in labels} == {(0.25 + 0.75, 0.0)}
