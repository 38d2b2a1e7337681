"""A service that is away, against a real replay: its trajectories wait, and none is buried."""

import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from asyncrl.config.schema import ScoringConfig, ScoringModelConfig
from asyncrl.replay.client import ReplayClient
from asyncrl.scoring.scorer import KindUnavailableError
from asyncrl.scoring.worker import Outages, ScoringWorker
from tests.helpers import GENEROUS_S, until
from tests.scoring.fakes import ServedPRM, make_scorer
from tests.scoring.mortal_scorer import Silent
from tests.scoring.replays import filled, replay_at

COUNT, ATTEMPTS = 24, 2


@pytest.mark.parametrize("serve", [[], ["prm"]])
def test_no_trajectory_is_buried_however_often_its_service_is_away(tmp_path, serve):
    """Seconds count as hours; where `serve` has no rules, another scorer judges by them."""
    config = ScoringConfig(rule="exact_match", prm=ScoringModelConfig(path="p"), batch_trajectories=4, serve=serve)
    stop, prm = threading.Event(), ServedPRM(calls=3 * ATTEMPTS)

    def work(endpoint, name, kinds):
        own = replace(config, serve=kinds)
        with closing(ReplayClient(endpoint, name, "1")) as client:
            ScoringWorker(client, make_scorer(own, prm), own, Silent(), 1e6, lambda: 1000 * time.monotonic()).run(stop)

    with (
        replay_at(tmp_path, config, COUNT, ATTEMPTS) as endpoint,
        closing(ReplayClient(endpoint, "test", "1", give_up_s=GENEROUS_S)) as replay,
    ):
        ids = filled(replay, COUNT)
        names = {"first": serve, **({"second": ["rules"]} if serve else {})}
        workers = [threading.Thread(target=work, args=(endpoint, *each)) for each in names.items()]
        for each in workers:
            each.start()
        try:
            until(lambda: replay.status()["labelled"] == COUNT)
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
    assert outages.available(["rules", "prm"], 0.9) == ["rules"]
    assert outages.available(["rules", "prm"], 1.0) == ["rules", "prm"]
    outages.end(["rules"], 1.0)
    outages.begin(KindUnavailableError("prm", "refused"), 1.0)
    assert outages.available(["prm"], 2.9) == []
    outages.end(["prm"], 3.0)
    outages.begin(KindUnavailableError("prm", "refused"), 4.0)
    assert outages.available(["prm"], 5.0) == ["prm"]
