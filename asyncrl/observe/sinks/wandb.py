"""Sends the configuration, curves, histograms, tables of episodes and the exported model to Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.observe.metrics import TRAINED_EPISODES, Histogram, LoggedEpisode, Sink, Value
from asyncrl.observe.sinks.source import Source, need

logger = logging.getLogger(__name__)

CORE = "wandb-core"
"""The name of the process that uploads. It is a child of this process."""


class Wandb(Sink):
    """One run of the service for each role. The roles of a run of asyncrl form a group. A role that starts again
    continues its run of the service. The column `step` is the x axis, because the service's own step must never fall,
    and evaluations of a step come late. Without an API key the sink works offline, and `wandb sync` sends the files of
    runs/NAME/wandb later.

    Raises ConfigError: the package is not installed.
    """

    def __init__(self, source: Source) -> None:
        need("wandb", "wandb")
        self._source = source
        self._opened: Any = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._run.log({"step": step, **values})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        import wandb

        made = {
            name: wandb.Histogram(np_histogram=(list(each.counts), list(each.edges)))
            for name, each in histograms.items()
        }
        self._run.log({"step": step, **{f"histogram/{name}": each for name, each in made.items()}})

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        import wandb

        names = list(dict.fromkeys(name for episode in episodes for name in episode.facts))
        rows = [[*(episode.facts.get(name) for name in names), episode.text] for episode in episodes]
        made = wandb.Table(columns=[*names, "episode"], data=rows, allow_mixed_types=True)
        self._run.log({"step": step, table: made})

    def model(self, step: int, folder: Path) -> None:
        import wandb

        run = self._run
        artifact = wandb.Artifact(f"{self._source.run}-model", type="model", metadata={"steps": step})
        artifact.add_dir(str(folder), policy="immutable")
        run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()
            self._opened = None

    def abandon(self) -> None:
        # When the process exits, wandb would wait without a limit until this child has uploaded everything. No data is
        # lost, since a file has all of it.
        for child in psutil.Process().children():
            if child.name() == CORE:
                child.kill()
        logger.warning("the upload is incomplete: `wandb sync` sends the rest of %s/wandb", self._source.run_dir)

    @property
    def _run(self) -> Any:
        if self._opened is None:
            import wandb

            source = self._source
            self._opened = run = wandb.init(
                project=source.project,
                dir=str(source.run_dir),
                group=source.run,
                job_type=source.role.partition("-")[0],
                name=f"{source.run} {source.role}",
                id=source.lasting_name(),
                resume="allow",
                config=dict(source.config),
                mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
                # The role's log already has the output, and this thread must not replace the process's streams. The
                # command line, which is part of wandb's metadata, may have keys of services.
                settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
            )
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            logger.info("Weights & Biases: %s", run.url or f"offline, in {run.dir}")
        return self._opened
