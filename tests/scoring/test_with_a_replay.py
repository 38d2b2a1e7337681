"""Scorers against a real replay: every trajectory is labelled exactly once, even if scorers die or services are
unavailable."""

import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from asyncrl.config.schema import ScoringConfig, ScoringModelConfig
from asyncrl.config.schema.scoring import needs
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.starts.admission import Admission
from asyncrl.scoring.scorer import KindUnavailableError
from asyncrl.scoring.worker import Outages, ScoringWorker
from tests.helpers import GENEROUS_S, make_trajectory, until
from tests.replay.support import ReplayThread, make_settings
from tests.scoring.fakes import ServedPRM, make_scorer
from tests.scoring.mortal_scorer import CONFIG, GROUPS, Silent

pytestmark = pytest.mark.slow

COUNT, MORTAL = 200, 8
SIZE = 2
KINDS = ["rules", "outcome_model,prm", "rules,outcome_model,prm"]
FEW, ATTEMPTS = 24, 2


@contextmanager
def replay_at(folder, config, count, max_attempts):
    """The endpoint of a replay in a thread that takes `count` trajectories, which need the kinds of `config`."""
    admission = Admission(max_lag=0, per_version=count)
    settings = make_settings(
        admission=admission, batch_size=count, max_attempts=max_attempts, needs=partial(needs, config)
    )
    with ReplayThread(folder, settings) as replay:
        yield replay.endpoint


def filled(replay, count):
    """The ids of `count` trajectories that wait to be scored."""
    ids = []
    while len(ids) < count:
        for ticket in replay.tickets([], count):
            replay.put(make_trajectory(ticket, tokens=np.full(8, 97, np.int32)))
            ids.append(ticket.id)
    return ids


@pytest.fixture
def endpoint(tmp_path):
    with replay_at(tmp_path, CONFIG, COUNT, max_attempts=1000) as endpoint:
        yield endpoint


def labelled_by_mortals(endpoint, names, kinds):
    """The labels and the status of a replay whose scorers die again and again, and the number of their lives."""
    lives, chance = count(), random.Random(0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(worker):
        life = next(lives)
        life_s = chance.uniform(0.05, 0.3) if life < MORTAL else 0
        arguments = [endpoint, f"{names}-{worker}", str(life), kinds[worker], str(life_s)]
        return subprocess.Popen([sys.executable, "-m", "tests.scoring.mortal_scorer", *arguments], env=environment)

    def all_labelled():
        for worker, scorer in enumerate(scorers):
            if scorer.poll() is not None:
                scorers[worker] = start(worker)
        return replay.status()["labelled"] == COUNT

    scorers = [start(worker) for worker in range(len(kinds))]
    replay = ReplayClient(endpoint, "test", "1", give_up_s=GENEROUS_S)
    try:
        ids = filled(replay, COUNT)
        until(all_labelled)
        return replay.labels(ids), replay.status(), next(lives)
    finally:
        for scorer in scorers:
            scorer.kill()
            scorer.wait()
        replay.close()


def test_every_trajectory_is_labelled_exactly_once_however_scorers_die(endpoint):
    labels, status, lives = labelled_by_mortals(endpoint, "scorer", KINDS)
    assert (status["labelled"], status["scoring_failures"]) == (COUNT, 0)
    assert lives > len(KINDS)
    assert status["leases_redelivered"] > 0
    assert {each.scorer for each in labels} == {"exact_match+outcome@1+fake@1"}
    assert {(each.reward, each.outcome) for each in labels} == {(0.25 + 0.75, 0.0)}


def test_every_group_is_judged_whole_and_exactly_once_however_scorers_die(tmp_path):
    with replay_at(tmp_path, GROUPS, COUNT, max_attempts=1000) as endpoint:
        labels, status, lives = labelled_by_mortals(endpoint, "manager", ["rules", "manager", "rules,manager"])
    assert (status["labelled"], status["scoring_failures"], status["depth_ready"]) == (COUNT, 0, COUNT // SIZE)
    assert lives > 3
    assert status["leases_redelivered"] > 0
    assert {each.scorer for each in labels} == {"exact_match+one_number"}
    numbers = defaultdict(set)
    for each in labels:
        numbers[each.trajectory_id.split(".")[0]].add(each.extra["manager"])
    # One call gave all members their rewards, and no call counts for two groups.
    assert {len(found) for found in numbers.values()} == {1}
    assert len(set.union(*numbers.values())) == len(numbers) == COUNT // SIZE


@pytest.mark.parametrize("serve", [[], ["prm"]])
def test_no_trajectory_is_dead_lettered_however_often_its_service_is_unavailable(tmp_path, serve):
    """Seconds count as hours; where `serve` has no rules, another scorer judges by them."""
    config = ScoringConfig(
        rule="exact_match", prm=ScoringModelConfig(path="p"), batch_trajectories=4, serve=serve, stall_s=1e6
    )
    stop, prm = threading.Event(), ServedPRM(calls=3 * ATTEMPTS)

    def work(endpoint, name, kinds):
        own = replace(config, serve=kinds)
        with closing(ReplayClient(endpoint, name, "1")) as client:
            ScoringWorker(client, make_scorer(own, prm), own, Silent(), 1e6, lambda: 1000 * time.monotonic()).run(
                stop, threading.Event()
            )

    with (
        replay_at(tmp_path, config, FEW, ATTEMPTS) as endpoint,
        closing(ReplayClient(endpoint, "test", "1", give_up_s=GENEROUS_S)) as replay,
    ):
        ids = filled(replay, FEW)
        names = {"first": serve, **({"second": ["rules"]} if serve else {})}
        workers = [threading.Thread(target=work, args=(endpoint, *each)) for each in names.items()]
        for each in workers:
            each.start()
        try:
            until(lambda: replay.status()["labelled"] == FEW)
        finally:
            stop.set()
            for each in workers:
                each.join()
        status = replay.status()
        assert {each.scorer for each in replay.labels(ids)} == {"exact_match+fake@1"}
    assert status["scoring_failures"] == 0
    assert status["leases_redelivered"] > ATTEMPTS


def test_one_kind_that_is_away_leaves_the_others_and_a_pause_is_no_news():
    outages = Outages()
    outages.begin(KindUnavailableError("prm", "refused"), 0.0)
    outages.begin(KindUnavailableError("prm", "refused"), 0.5)
    assert outages.text == "prm: refused"
    assert outages.available(["rules", "prm"], 0.9) == ["rules"]
    assert outages.available(["rules", "prm"], 1.0) == ["rules", "prm"]
    outages.end(["rules"], 1.0)
    outages.begin(KindUnavailableError("prm", "refused"), 1.0)
    assert outages.available(["prm"], 2.9) == []
    outages.end(["prm"], 3.0)
    assert outages.text == ""
    outages.begin(KindUnavailableError("prm", "refused"), 4.0)
    assert outages.available(["prm"], 5.0) == ["prm"]
