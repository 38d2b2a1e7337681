from __future__ import annotations

import numpy as np
import torch

from asyncrl.learner.packing import build_local_batch
from asyncrl.learner.step_metrics import Phases, lag_counts, lag_values
from tests.helpers import make_trajectory

CPU = torch.device("cpu")


def test_the_lag_of_a_trajectory_is_that_of_its_oldest_token():
    versions = np.array([-1, -1, -1, -1, 3, 4, 5, 5], np.int32)
    trajectories = [make_trajectory(versions=versions), make_trajectory(version=5), make_trajectory(version=1)]
    counts = lag_counts(build_local_batch([0, 1, 2], trajectories, CPU).tokens, version=5, max_lag=2)
    assert counts.tolist() == [1, 0, 1, 1]
    assert lag_values(counts) == {"lag/mean": 5 / 3, "lag/max": 3.0, "lag/histogram": [1.0, 0.0, 1.0, 1.0]}
    assert lag_counts(build_local_batch([], [], CPU).tokens, version=5, max_lag=2).tolist() == [0, 0, 0, 0]


def test_idle_is_the_share_of_a_step_spent_waiting_for_others():
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    for name, seconds in (("wait", 1.0), ("fetch", 0.5), ("train", 4.5)):
        with phases(name):
            now[0] += seconds
    by_phase = {"seconds/wait": 1.0, "seconds/fetch": 0.5, "seconds/train": 4.5, "seconds/step": 6.0}
    assert phases.values(tokens=60) == {**by_phase, "idle": 0.25, "tokens_per_s": 10.0}
