"""The plain alternative to the replay: a Ray actor with a deque of pickled samples.

It loses everything in a crash, has no tickets and checks nothing. 8 producers, each with 8 calls under way, pickle
samples of four arrays. One consumer takes 16 samples at a time and unpickles them. It runs under a Python that has Ray
(`pip install ray==2.60.0 numpy cloudpickle`), without asyncrl:

    PYTHON benchmarks/ray_deque.py 8192 4000
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import cloudpickle
import numpy as np
import ray

PRODUCERS, CREDITS, BATCH = 8, 8, 16


@ray.remote(num_cpus=0)
class Samples:
    """A queue of samples."""

    def __init__(self) -> None:
        self._samples: deque[bytes] = deque()

    def put(self, sample: bytes) -> None:
        self._samples.append(sample)

    def take(self, count: int) -> list[bytes]:
        return [self._samples.popleft() for _ in range(min(count, len(self._samples)))]


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def produce(samples: Any, count: int, tokens: int) -> None:
    sample = {
        "tokens": np.zeros(tokens, np.int32),
        "loss_mask": np.ones(tokens, np.bool_),
        "logprobs": np.full(tokens, -0.5, np.float32),
        "versions": np.zeros(tokens, np.int32),
    }
    away: list[Any] = []
    for number in range(count):
        away.append(samples.put.remote(cloudpickle.dumps({**sample, "id": number})))
        if len(away) == CREDITS:
            done, away = ray.wait(away)
            ray.get(done)
    ray.get(away)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def consume(samples: Any, count: int) -> None:
    while count:
        taken = ray.get(samples.take.remote(BATCH))
        count -= len([cloudpickle.loads(sample)["tokens"] for sample in taken])


def run(samples: Any, count: int, tokens: int) -> float:
    """Seconds from the first sample to the last one taken."""
    started = time.perf_counter()
    producing = [produce.remote(samples, count // PRODUCERS, tokens) for _ in range(PRODUCERS)]
    ray.get([*producing, consume.remote(samples, count)])
    return time.perf_counter() - started


def main() -> None:
    tokens, count = int(sys.argv[1]), int(sys.argv[2]) // PRODUCERS * PRODUCERS
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    samples = Samples.remote()  # type: ignore[attr-defined]
    run(samples, 10 * PRODUCERS, tokens)  # A warm-up: workers start and import.
    seconds = run(samples, count, tokens)
    print(json.dumps({"trajectories": count, "per_s": count / seconds, "ray": ray.__version__}))
    ray.shutdown()


if __name__ == "__main__":
    main()
