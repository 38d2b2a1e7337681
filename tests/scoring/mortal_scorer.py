"""A scoring process without torch: `ENDPOINT WORKER INCARNATION KINDS LIFE_S`. Its process model takes its time; kill
-9 comes LIFE_S seconds after its first lease, unless that is 0."""

import os
import signal
import sys
import threading
import time

from asyncrl.config.schema import OutcomeModelConfig, ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.replay.client import ReplayClient
from asyncrl.scoring.worker import ScoringWorker
from tests.scoring.fakes import FakeOutcome, FakePRM, make_scorer

CONFIG = ScoringConfig(
    rule="exact_match",
    prm=ScoringModelConfig(path="p"),
    outcome_model=OutcomeModelConfig(path="o"),
    shaping=ShapingConfig(process_weight=1.0),
    batch_trajectories=4,
)


class SlowPRM(FakePRM):
    def _one(self, transcript):
        time.sleep(0.01)
        return super()._one(transcript)


class Silent:
    def log(self, step, values):
        pass


class Mortal(ReplayClient):
    """Its first trajectories start the clock."""

    life_s = 0.0

    def lease(self, serves, trajectories, tokens):
        leases = super().lease(serves, trajectories, tokens)
        if leases and self.life_s:
            threading.Timer(self.life_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self.life_s = 0.0
        return leases


def main(endpoint: str, worker: str, incarnation: str, kinds: str, life_s: str) -> None:
    CONFIG.serve = kinds.split(",")
    client = Mortal(endpoint, worker, incarnation)
    client.life_s = float(life_s)
    scorer = make_scorer(CONFIG, SlowPRM(), FakeOutcome())
    ScoringWorker(client, scorer, CONFIG, Silent(), 10.0).run(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
