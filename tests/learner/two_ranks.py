"""Run as ranks by test_ranks.py: trains small runs and writes down what they published and measured.

A rank that sends a pickle, or unpickles anything that is more than plain values, fails."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import StoppedError
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.learner.run import train
from tests.learner.support import FakeMetrics, FakePublisher, FakeReplay, make_config, with_critic

BATCHES = {
    "even": {"batch_size": 8, "group_size": 4, "minibatches": 2, "steps": 3},
    "odd": {"batch_size": 3, "group_size": 3, "steps": 2},
    "lonely": {"batch_size": 1, "group_size": 1, "steps": 2},
}


def configs(model: Path, mixture: Path, folder: Path) -> dict[str, TrainConfig]:
    """Runs whose shares are even, uneven, and empty on one of two ranks; one that trains a critic too, and one of a
    mixture of experts."""
    runs = {name: make_config(model, folder / name, **values) for name, values in BATCHES.items()}
    return runs | {
        "critic": with_critic(make_config(model, folder / "critic", **BATCHES["odd"])),
        "mixture": make_config(mixture, folder / "mixture", **BATCHES["odd"]),
    }


def train_all(model: Path, mixture: Path, folder: Path, ranks: Ranks) -> dict[str, tuple[dict, dict]]:
    results = {}
    for name, config in configs(model, mixture, folder).items():
        publisher, metrics = FakePublisher(), FakeMetrics()
        train(config, ranks, FakeReplay(config), publisher if ranks.rank == 0 else None, metrics, threading.Event())
        results[name] = (publisher.weights, {each: metrics.of(each) for each in ("loss", "grad_norm", "lag/histogram")})
    return results


def stop_one_of_two(model: Path, folder: Path, ranks: Ranks) -> bool:
    """Ask rank 1 alone to stop; whether this rank leaves."""
    config = make_config(model, folder / "stopped")
    stop = threading.Event()
    if ranks.rank == 1:
        stop.set()
    try:
        train(config, ranks, FakeReplay(config), None, FakeMetrics(), stop)
    except StoppedError:
        return True
    return False


def refuse_pickles() -> None:
    """Fail where torch pickles for other ranks, and where anything is looked up by name in a pickle."""

    def refuse(*_: object) -> None:
        raise AssertionError("a rank sends a pickle")

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            raise AssertionError(f"a rank unpickles {arguments}")

    distributed_c10d._object_to_tensor = refuse
    sys.addaudithook(watch)


def main(model: Path, mixture: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    refuse_pickles()
    with joined() as ranks:
        results = train_all(model, mixture, folder, ranks)
        stopped = stop_one_of_two(model, folder, ranks)
        if ranks.rank == 0:
            torch.save({"results": results, "stopped": stopped, "size": ranks.size}, folder / "results.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
