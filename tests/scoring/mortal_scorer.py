"""A scoring process without torch: `ENDPOINT WORKER INCARNATION KINDS LIFE_S`. Its process model and its manager take
their time; kill -9 comes LIFE_S seconds after its first lease, unless that is 0."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from itertools import count

from asyncrl.config.schema import ManagerConfig, OutcomeModelConfig, ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.replay.client.client import ReplayClient
from asyncrl.scoring.managers import ManagerScore
from asyncrl.scoring.worker import ScoringWorker
from tests.scoring.fakes import FakeOutcome, FakePRM, make_scorer

CONFIG = ScoringConfig(
    rule="exact_match",
    prm=ScoringModelConfig(path="p"),
    outcome_model=OutcomeModelConfig(path="o"),
    shaping=ShapingConfig(process_weight=1.0),
    batch_trajectories=4,
)


GROUPS = ScoringConfig(
    rule="exact_match",
    manager=ManagerConfig(name="one_number", batch_groups=2),
    needs={"test": ["rules", "manager"]},
    batch_trajectories=4,
)


class OneNumber:
    """Gives all members of a group one number, which no other call in any process gives."""

    def __init__(self, life: int) -> None:
        self._numbers = count(1000 * life)

    def submit(self, groups):
        time.sleep(0.01)
        return [self._judged(len(group), float(next(self._numbers))) for group in groups]

    def _judged(self, members: int, number: float) -> list[Future]:
        futures: list[Future] = [Future() for _ in range(members)]
        for future in futures:
            future.set_result(ManagerScore(number, 1.0))
        return futures


class SlowPRM(FakePRM):
    def _one(self, transcript):
        time.sleep(0.01)
        return super()._one(transcript)


class Silent:
    def log(self, step, values):
        pass


class Mortal(ReplayClient):
    """A client whose process is killed `life_s` seconds after it got its first trajectories."""

    life_s = 0.0

    def lease(self, serves, trajectories, tokens, groups=1):
        leases = super().lease(serves, trajectories, tokens, groups)
        if leases and self.life_s:
            threading.Timer(self.life_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self.life_s = 0.0
        return leases


def main(endpoint: str, worker: str, incarnation: str, kinds: str, life_s: str) -> None:
    config = GROUPS if "manager" in worker else CONFIG
    config.serve = kinds.split(",")
    client = Mortal(endpoint, worker, incarnation)
    client.life_s = float(life_s)
    scorer = make_scorer(config, SlowPRM(), FakeOutcome(), OneNumber(int(incarnation)))
    ScoringWorker(client, scorer, config, Silent(), 10.0).run(threading.Event(), threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
