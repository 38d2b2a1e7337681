"""Whole runs in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.config.schema import TrainConfig
from asyncrl.observe.sinks import read_lines
from tests.helpers import GENEROUS_S, until

ROOT = Path(__file__).parents[2]


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration that a run wrote down."""
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(run_dir / "config.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig)
    return config


class Run:
    """`asyncrl COMMAND` at work; its run folder is `dir`."""

    def __init__(self, command: str, folder: Path, *overrides: str) -> None:
        self.dir = folder / "run"
        self._output = (folder / "output").open("w+")
        arguments = [f"run.dir={folder}", "run.name=run", "network.replay_port=0", "network.weights_port=0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", command, *arguments, *overrides],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )

    @property
    def output(self) -> str:
        """What it has printed."""
        self._output.flush()
        return Path(self._output.name).read_text()

    def steps(self) -> list[dict[str, Any]]:
        """The learner's metrics, a line a step; a step that was done again stands twice."""
        return [line for line in read_lines(self.dir / "metrics" / "learner.jsonl") if "reward/mean" in line]

    def accuracies(self) -> list[float]:
        """The held-out accuracies so far, in the order of their steps."""
        lines = read_lines(self.dir / "metrics" / "learner.jsonl")
        return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.output
            return any(line["step"] >= step for line in self.steps())

        until(reached, seconds)

    def kill(self, role: str) -> None:
        """SIGKILL, which nobody can prepare for."""
        os.kill(json.loads((self.dir / "processes.json").read_text())[role], signal.SIGKILL)

    def stop(self) -> None:
        """End it, if it has not."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(GENEROUS_S)
        self._output.close()

    def finish(self, seconds: float = 480.0) -> dict[str, Any]:
        """Wait for the end; returns the last line, which is JSON where the command ends so."""
        assert self.process.wait(seconds) == 0, self.output
        last = self.output.strip().splitlines()[-1]
        return dict(json.loads(last)) if last.startswith("{") else {}

    def logs(self) -> str:
        """Every role's log."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted((self.dir / "logs").glob("*.log")))
