"""Scorers of several kinds against a real replay, killed at random: every trajectory is labelled exactly once."""

import os
import random
import subprocess
import sys
from itertools import count

import pytest

from asyncrl.replay.client import ReplayClient
from tests.helpers import GENEROUS_S, until
from tests.scoring.mortal_scorer import CONFIG
from tests.scoring.replays import filled, replay_at

COUNT, MORTAL = 200, 8
KINDS = ["rules", "outcome_model,prm", "rules,outcome_model,prm"]


@pytest.fixture
def endpoint(tmp_path):
    with replay_at(tmp_path, CONFIG, COUNT, max_attempts=1000) as endpoint:
        yield endpoint


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
    replay = ReplayClient(endpoint, "test", "1", give_up_s=GENEROUS_S)
    try:
        ids = filled(replay, COUNT)
        until(all_labelled)
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
