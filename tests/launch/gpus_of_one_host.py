"""The GPUs of one host that each process sees: one table for every launcher. No GPU is needed: processes only print."""

from __future__ import annotations

import sys

from asyncrl.config.schema import EngineConfig, ModelConfig, RunConfig, ServerConfig, TrainConfig
from asyncrl.launch.role_process import RoleCommand

SEEN = {
    1: {"learner": "0", "actor-0": "0", "scoring-0": "0", "replay": ""},
    2: {"learner": "0", "actor-0": "1", "scoring-0": "1", "replay": ""},
    4: {"learner": "0,1", "actor-0": "2", "scoring-0": "3", "replay": ""},
    8: {"learner": "0,1,2,3", "actor-0": "4,5,6", "scoring-0": "7", "replay": ""},
}
"""CUDA_VISIBLE_DEVICES of the processes of a run with SGLang and a scorer with a model, by the number of GPUs."""
TELL = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))"


def make_config(folder: str, gpus: int, launcher: str = "local") -> TrainConfig:
    """A run on one host with so many GPUs, no matter how many this machine has."""
    config = TrainConfig(
        run=RunConfig(name="run", dir=folder), model=ModelConfig(path="m"), engine=EngineConfig("sglang")
    )
    config.engine.server = ServerConfig(tp_size=1)
    config.scoring.prm.path, config.scoring.prm.device = "prm", "auto"
    config.cluster.launcher, config.cluster.gpus, config.cluster.cpus = launcher, gpus, 16
    config.network.replay_port = config.network.weights_port = 0
    return config


def telling(name: str) -> RoleCommand:
    """A process that takes the place of a role, and writes into its log which GPUs it sees."""
    return RoleCommand(name, [sys.executable, "-c", TELL])


def seen(log: str) -> str:
    """Return the GPUs that a process has written into its log."""
    return next(line for line in log.splitlines() if line.startswith("sees")).removeprefix("sees").strip()
