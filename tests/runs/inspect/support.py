"""A run folder as training leaves it, with a store of episodes of several turns, and with the configuration."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console, RenderableType

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.types import Labels, Role, Step, Ticket, ToolCall, Trajectory, Turn
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings

CALL = ToolCall("calculator", {"expression": "1+2", "nested": {"deep": [1, None]}})
TURNS = (
    Turn(0, 3, Role.PROMPT),
    Turn(3, 7, Role.ASSISTANT, "stop", (CALL,)),
    Turn(7, 9, Role.TOOL),
    Turn(9, 12, Role.ASSISTANT, "stop"),
)
STEPS = (Step(3, 5), Step(5, 7), Step(9, 12))


def make_episode(ticket: Ticket, version: int = 0) -> Trajectory:
    """Twelve tokens: a prompt, a call, a result, an answer; the answer was sampled by the version after `version`."""
    mask = np.zeros(12, np.bool_)
    mask[3:7] = mask[9:] = True
    versions = np.full(12, -1, np.int32)
    versions[3:7], versions[9:] = version, version + 1
    return make_trajectory(
        ticket,
        length=12,
        logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        versions=versions,
        turns=TURNS,
        steps=STEPS,
        rewards={"calculator": 0.5},
        timings={"generate": 0.125, "tools": 0.1},
        routed_experts=np.arange(12 * 6, dtype=np.uint8).reshape(12, 6),
    )


def score(core: Core, trajectory: str, reward: float = 1.0) -> None:
    labels = Labels(
        trajectory,
        reward,
        reward / 2,
        "rule+model",
        np.array([0.9, 0.5, 0.1], np.float32),
        np.array([step.end for step in STEPS], np.int32),
        {"process": 0.5},
    )
    core.put_labels(labels)


def run_episodes(core: Core, want: int, version: int = 0) -> list[str]:
    """Take tickets, run them, score them; returns the trajectories' ids."""
    for ticket in core.tickets(want):
        core.put(make_episode(ticket, version))
    done = [trajectory.id for trajectory in core.lease()]
    for number, name in enumerate(done):
        score(core, name, number / 8)
    return done


def make_run(folder: Path, **changes: Any) -> Core:
    """A core whose store and configuration are in the run folder `folder`; everything that was trained is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    return Core(folder / "replay", make_settings(keep_steps=float("inf"), **changes))


def write_config(folder: Path, **network: Any) -> None:
    config = TrainConfig(model=ModelConfig(path=str(folder / "no-model")))
    config.data.train = ["tasks.parquet"]
    for name, value in network.items():
        setattr(config.network, name, value)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))


def printed(what: RenderableType) -> str:
    """Return the text that a terminal without colours shows."""
    output = StringIO()
    Console(file=output, width=120).print(what)
    return output.getvalue()
