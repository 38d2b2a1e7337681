"""Whole runs in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from omegaconf import OmegaConf

from asyncrl.config.schema import TrainConfig
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.helpers import GENEROUS_S, until

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.213.7.1", "10.213.7.2")
"""The addresses of two network namespaces."""
DEVICE = "veth0"
"""The network interface of each."""
DELAY_S = 0.05
"""The time that a packet takes one way between hosts that are far from each other."""


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration that a run wrote down."""
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(run_dir / "config.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig)
    return config


class Run:
    """`asyncrl COMMAND` at work, until a `with` block ends at the latest; its run folder is `dir`."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def output(self) -> str:
        """The text that it has printed."""
        self._output.flush()
        return Path(self._output.name).read_text()

    def steps(self) -> list[dict[str, Any]]:
        """The learner's metrics, a line a step."""
        return [line for line in read_lines(metrics_file(self.dir, "learner")) if "reward/mean" in line]

    def accuracies(self) -> list[float]:
        """The held-out accuracies so far, in the order of their steps."""
        return [line["eval/accuracy"] for line in read_lines(metrics_file(self.dir, "evaluation"))]

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.output
            return any(line["step"] >= step for line in self.steps())

        until(reached, seconds)

    def processes(self) -> dict[str, int]:
        """The roles that run, and the learner's ranks as learner-0 and so on."""
        roles = _children(self.process.pid)
        return {**_children(roles.get("learner")), **roles}

    def ranks(self) -> dict[str, int]:
        return {name: pid for name, pid in self.processes().items() if name.startswith("learner-")}

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process, which cannot prepare for it."""
        os.kill(self.processes()[name], signal.SIGKILL)

    def newest_step(self) -> int:
        return max((line["step"] for line in self.steps()), default=-1)

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


def _children(parent: int | None) -> dict[str, int]:
    """The workers that a process has started, by name."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children() if parent else ():
            with suppress(psutil.NoSuchProcess):
                if name := child.environ().get(WORKER_VARIABLE):
                    found[name] = child.pid
    return found
