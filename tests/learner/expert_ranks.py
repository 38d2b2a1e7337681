"""Run as ranks by test_expert_ranks.py: trains mixtures whose experts are spread over the ranks, and writes down what
they published."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import TrainConfig
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import Run, make_config

MEASURED = ("loss", "grad_norm", "experts/imbalance", "experts/balance_loss", "routing/replayed", "routing/changed")


def configs(models: Path, folder: Path, steps: int) -> dict[str, TrainConfig]:
    """A run for each of the `models`: a balanced one with replayed experts whose layers are computed again, one with
    biases, and one of which the experts are frozen."""
    batch = {"batch_size": 3, "group_size": 3, "checkpoint_every": 1, "steps": steps}
    families = sorted(each.name for each in models.iterdir())
    runs = {family: make_config(models / family, folder / family, **batch) for family in families}
    runs["qwen3_moe"].learner.router_replay = True
    runs["qwen3_moe"].model.activations, runs["qwen3_moe"].algorithm.balance_weight = 0.4, 0.5
    runs["glm4_moe"].model.freeze = ["moe_experts"]
    return runs


def train_all(models: Path, folder: Path, steps: int, ranks: Ranks) -> dict[str, Any]:
    """Train the runs. Returns the weights that they published and their metrics, by family."""
    found = {}
    for family, config in configs(models, folder, steps).items():
        run = Run(config).train(ranks)
        found[family] = (run.weights, {name: run.metrics.of(name) for name in MEASURED})
    return found


def main(models: Path, folder: Path, steps: int, replicas: int, context_ranks: int, expert_ranks: int) -> None:
    torch.set_num_threads(1)
    with joined(replicas, context_ranks=context_ranks, expert_ranks=expert_ranks) as ranks:
        found = train_all(models, folder, steps, ranks)
        if ranks.rank == 0:
            torch.save(found, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
