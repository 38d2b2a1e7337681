"""The verifier of chaos runs: light, since every start of a scorer imports it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from asyncrl.errors import ScoringError
from asyncrl.ids import TRIAL_GROUP, shard_of
from asyncrl.types import Task, Trajectory

SHARDS = 2
WITNESS_VARIABLE = "ASYNCRL_TEST_WITNESS"


def coin(task: Task, answer: str, trajectory: Trajectory) -> float:
    """Return a reward that depends on the trajectory's id alone; one trajectory in fifty cannot be judged.

    A judged trajectory was accepted, so its id is written to the file that the monkey reads.
    """
    witness = os.environ.get(WITNESS_VARIABLE)
    if witness and trajectory.group_id != TRIAL_GROUP:
        with Path(witness).open("a") as file:
            file.write(f"{trajectory.id}\n")
    fate = zlib.crc32(trajectory.id.encode())
    if fate % 50 == 0:
        raise ScoringError("this one cannot be judged")
    return float(fate // 50 % 2)


def solved(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A coin until the tasks are solved: the answers of shard 0 are right from version 2 on, and those of shard 1 from
    version 4 on."""
    if trajectory.group_id != TRIAL_GROUP and trajectory.oldest_version >= 2 * (1 + shard_of(trajectory.id, SHARDS)):
        return 1.0
    return float(zlib.crc32(trajectory.id.encode()) % 2)
