"""A scoring process without torch, to be killed: `ENDPOINT WORKER INCARNATION KINDS`. Its models take their time."""

import sys
import threading
import time

from asyncrl.config.schema import OutcomeModelConfig, ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.replay.client import ReplayClient
from asyncrl.scoring.worker import Worker
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
        time.sleep(0.005)
        return super()._one(transcript)


class Silent:
    def log(self, step, values):
        pass


def main(endpoint: str, worker: str, incarnation: str, kinds: str) -> None:
    CONFIG.serve = kinds.split(",")
    scorer = make_scorer(CONFIG, SlowPRM(), FakeOutcome())
    Worker(ReplayClient(endpoint, worker, incarnation), scorer, CONFIG, Silent(), 10.0).run(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
