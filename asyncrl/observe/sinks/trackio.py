"""Gives metrics to trackio: curves, histograms, and episodes as traces, in a database of this machine.

trackio keeps them in its own folder (TRACKIO_DIR), where `trackio show` reads the runs of all projects. The environment
variables TRACKIO_SPACE_ID and TRACKIO_SERVER_URL send them elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.metrics import TRAINED_EPISODES, Histogram, LoggedEpisode, Sink, Value
from asyncrl.observe.sinks.source import Source, need


class Trackio(Sink):
    """One run of trackio for each role. The roles of a run of asyncrl form a group. A role that starts again continues
    its run of trackio.

    Raises ConfigError: the package is not installed.
    """

    def __init__(self, source: Source) -> None:
        need("trackio", "trackio")
        self._source = source
        self._opened: Any = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._run.log(dict(values), step=step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        import trackio

        made = {name: trackio.Histogram(np_histogram=(each.counts, each.edges)) for name, each in histograms.items()}
        self._run.log({f"histogram/{name}": each for name, each in made.items()}, step=step)

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        import trackio

        for number, each in enumerate(episodes):
            trace = trackio.Trace([dict(message) for message in each.messages], metadata=dict(each.facts))
            self._run.log({f"{table}/{number}": trace}, step=step)

    def model(self, step: int, folder: Path) -> None:
        import trackio

        artifact = trackio.Artifact(f"{self._source.run}-model", type="model", metadata={"steps": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()
            self._opened = None

    @property
    def _run(self) -> Any:
        if self._opened is None:
            import trackio

            source = self._source
            self._opened = trackio.init(
                project=source.project,
                name=source.lasting_name() or f"{source.run}-{source.role}",
                group=source.run,
                config=dict(source.config),
                resume="allow",
                embed=False,
                # observe/usage.py measures the use of GPUs and CPUs already.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._opened
