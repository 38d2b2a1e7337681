"""The command lines of a run's processes. Launchers know these, never the code behind them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class Role:
    """One process to start: its name, which stays over restarts, and its command line."""

    name: str
    command: Sequence[str]


def roles(config: TrainConfig, overrides: Sequence[str]) -> list[Role]:
    """Every process of a run on one machine, in the order of starting (any order works)."""
    cluster = config.cluster
    return [
        *_replay(config.replay.shards, overrides),
        *(_role(f"scoring-{index}", "scoring", overrides) for index in range(cluster.scorers)),
        *(_role(f"actor-{index}", "actor", overrides) for index in range(cluster.actors)),
        _role("learner", "learner", overrides),
    ]


def _replay(shards: int, overrides: Sequence[str]) -> list[Role]:
    if shards == 1:
        return [_role("replay", "replay", overrides)]
    return [_role(f"replay-{shard}", "replay", [*overrides, f"replay.shard={shard}"]) for shard in range(shards)]


def _role(name: str, module: str, overrides: Sequence[str]) -> Role:
    return Role(name, [sys.executable, "-m", f"asyncrl.{module}", *overrides])
