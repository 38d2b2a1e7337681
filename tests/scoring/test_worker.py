import threading

import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import RefusedError
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.verifier import Verifier
from asyncrl.scoring.worker import Worker
from tests.scoring.fakes import CharTokenizer, FakePRM, FakeReplay, answered


class Clock:
    """Seconds that pass when told to, and `tick` at every look."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


class Log:
    def __init__(self, stop=None):
        self.rows, self.stop = [], stop

    def log(self, step, values):
        self.rows.append((step, values))
        if self.stop:
            self.stop.set()

    def close(self):
        pass


@pytest.fixture(scope="module")
def verifier():
    verifier = Verifier("exact_number", {}, timeout_s=10.0)
    yield verifier
    verifier.close()


def worker(verifier, replay, clock=None, log=None, prm=None):
    config = ScoringConfig()
    scorer = Scorer(config, CharTokenizer(), verifier, prm or FakePRM())
    return Worker(replay, scorer, config, log or Log(), lease_s=30.0, clock=clock or Clock())


def test_every_leased_episode_comes_back_as_labels_or_with_a_reason(verifier):
    episodes = [answered("72", 0), answered("72 bad", 1), answered("5", 2), answered("72", 3, truth="none")]
    replay = FakeReplay(episodes)
    worker(verifier, replay).work(threading.Event())
    assert {name: labels.outcome for name, labels in replay.labels.items()} == {"episode-0": 1.0, "episode-2": 0.0}
    assert set(replay.failures) == {"episode-1", "episode-3"}
    assert "IndexError" in replay.failures["episode-1"]


def test_leases_are_renewed_while_a_long_batch_runs(verifier):
    replay = FakeReplay([answered("72", index) for index in range(20)])
    worker(verifier, replay, Clock(tick=5.0)).work(threading.Event())
    assert len(replay.labels) == 20
    assert 5 <= replay.renewals <= 20


def test_metrics_tell_counts_rates_and_agreement(verifier):
    stop = threading.Event()
    log = Log(stop)
    replay = FakeReplay([answered("72", 0), answered("5", 1)], [answered("72", 2), answered("bad", 3)])
    worker(verifier, replay, Clock(tick=0.25), log).run(stop)
    assert len(replay.labels) == 3
    (step, values), (_, last) = log.rows
    assert step == values["labelled"] == 3
    assert values["failed"] == 1
    assert values["outcome_mean"] == values["reward_mean"] == pytest.approx(2 / 3)
    assert values["process_mean"] == pytest.approx(0.75)
    assert values["prm_agreement"] == pytest.approx(2 / 3)
    assert values["tokens_per_s"] > 0
    assert 0 < values["idle"] < 1
    assert last["labelled"] == 3, "what came after the last report is told at the end"
    assert "reward_mean" not in last


def test_labels_that_the_replay_refuses_are_a_failure_and_the_worker_goes_on(verifier):
    class Refusing(FakeReplay):
        def label(self, labels):
            if labels[0].trajectory_id == "episode-0":
                raise RefusedError("the replay refused labels: too late")
            super().label(labels)

    replay = Refusing([answered("72", 0), answered("72", 1)])
    worker(verifier, replay).work(threading.Event())
    assert set(replay.labels) == {"episode-1"}
    assert "too late" in replay.failures["episode-0"]


def test_a_stop_ends_the_work_after_the_episode_at_hand(verifier):
    stop = threading.Event()

    class Stopping(FakeReplay):
        def label(self, labels):
            super().label(labels)
            stop.set()

    replay = Stopping([answered("72", index) for index in range(9)])
    worker(verifier, replay).run(stop)
    assert len(replay.labels) == 1
    assert replay.failures == {}
