"""A role's metrics of every kind, for sinks that are read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.observe.metrics import HELD_OUT_EPISODES, Histogram, LoggedEpisode, Sink
from asyncrl.observe.sinks.source import Source

HOSTILE = "<script>alert(1)</script> \x1b[31mred\x1b[0m"
LAGS = Histogram((3.0, 1.0), (-0.5, 0.5, 1.5))
EPISODE = LoggedEpisode(
    {"id": "a", "reward": 0.5},
    [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": HOSTILE}],
)


def source(run_dir: Path, role: str = "learner") -> Source:
    config = {"learner": {"steps": 4}, "run": {"name": run_dir.name}}
    return Source(run_dir, role, "project", config, lambda: "0123abcd")


def play(make: Callable[[], Sink], model: Path) -> None:
    """A run of three steps that is killed and trains its last step again."""
    first = make()
    for step in range(3):
        first.log(step, {"loss": 1.0 - step, "mood": "fine"})
    first.histograms(2, {"lag": LAGS})
    first.close()
    second = make()
    second.resumed(2)
    for step in (2, 3):
        second.log(step, {"loss": 10.0 - step})
    second.episodes(3, [EPISODE])
    second.episodes(3, [EPISODE], HELD_OUT_EPISODES)
    second.model(4, model)
    second.close()
    second.close()
