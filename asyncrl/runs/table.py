"""Describes many runs in a table: the state, progress and results of each run, and the keys in which the runs differ.

A look at unchanged runs is cheap. The first look at hundreds of runs takes seconds, so each look has a limited time and
continues where the last one stopped.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config.changes import is_of_run
from asyncrl.config.locations import FINE_TUNING_FILE
from asyncrl.config.option import as_yaml
from asyncrl.config.secrets import masked_value
from asyncrl.errors import ConfigError
from asyncrl.runs.health.evidence import MOST_STEPS
from asyncrl.runs.health.trends import of_evaluations, of_steps
from asyncrl.runs.run import Run

STOPPED = "stopped"
LONGEST_VALUE = 80
RESULTS = {
    False: {
        "reward": ("learner", "reward/mean"),
        "accuracy": ("evaluation", "eval/accuracy"),
        "outcome": ("evaluation", "eval/outcome"),
    },
    True: {"loss": ("learner", "sft/loss"), "held_out_loss": ("evaluation", "eval/loss")},
}
"""The results of a reinforcement learning run (False) and of a fine-tuning (True): the file and the metric of each."""


def state_of(run: Run) -> str:
    """The state of a run: running, or the result with which it ended. A run without a result counts as stopped."""
    return "running" if run.is_running() else run.end() or STOPPED


def is_fine_tuning(run: Run) -> bool:
    """True for a run of `asyncrl sft`, which has no episodes and no rewards."""
    return (run.folder / FINE_TUNING_FILE).exists()


def started(run: Run) -> float:
    """The time at which the configuration of the newest start was written, in seconds since 1970; 0 without one."""
    try:
        return run.config_file.stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the table.

    - `step`: the trained steps; `steps`: the planned ones, `None` if they are unknown;
    - `results`: the first and the last value of each result that the run has, by the names in `RESULTS`. Values of
      training batches are means over some steps, as in the summary of a run;
    - `configuration`: the main choices, by their key; `differs`: the value of each key in which runs of one kind
      differ, without the values that this run shares with more than half of them;
    - `changed`: the time of the newest row, in seconds since 1970; 0 without rows.
    """

    is_fine_tuning: bool
    state: str
    step: int
    steps: int | None
    results: Mapping[str, tuple[float, float]]
    configuration: Mapping[str, str]
    differs: Mapping[str, str]
    changed: float


@dataclass(slots=True)
class _Known:
    """The line of a run, its configuration, and the states of the files from which both were read."""

    files: tuple[Any, ...] | None = None
    config: tuple[int, ...] | None = None
    line: RunLine | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class RunTable:
    """The table of `runs`, by their keys. It reads the newest runs first. Only one thread at a time may use it."""

    def __init__(self, runs: Mapping[str, Run], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._known = {key: _Known() for key in runs}
        self._longest_unread = deque(sorted(runs, key=lambda key: -started(runs[key])))
        self._differs: dict[str, dict[str, str]] = {}

    def look(self, seconds: float) -> tuple[dict[str, RunLine], bool]:
        """The lines of the runs that are read so far, and whether these are all runs. Stops reading after `seconds`,
        and reads at least one run."""
        end = self._clock() + seconds
        is_changed = False
        for _ in self._runs:
            key = self._longest_unread.popleft()
            self._longest_unread.append(key)
            is_changed |= _read(self._runs[key], self._known[key])
            if self._clock() > end:
                break
        if is_changed:
            self._differs = {
                key: found
                for kind in RESULTS
                for key, found in differences({each: known.values for each, known in self._of(kind).items()}).items()
            }
        lines = {
            key: replace(known.line, state=state_of(self._runs[key]), differs=self._differs.get(key, {}))
            for key, known in self._known.items()
            if known.line is not None
        }
        return lines, len(lines) == len(self._runs)

    def _of(self, kind: bool) -> dict[str, _Known]:
        return {
            key: known
            for key, known in self._known.items()
            if known.line is not None and known.line.is_fine_tuning is kind
        }


def differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Map each run to the keys in which runs differ, and to its values of these keys. `runs` has the values of all keys
    of each run; a run without values is not compared. Addresses and the name of a run do not count. If more than half
    of the runs have the same value of a key, the entries of these runs leave out the key."""
    known = {name: values for name, values in runs.items() if values}
    found: dict[str, dict[str, str]] = {name: {} for name in known}
    for key in dict.fromkeys(key for values in known.values() for key in values):
        if key == "run.name" or not is_of_run(key):
            continue
        values = [each.get(key) for each in known.values()]
        if all(value == values[0] for value in values):
            continue
        # Making a text takes long, and most runs share a few values: each value becomes a text only once.
        different = {repr(value): value for value in values}
        shown = {word: _shown(key, value) for word, value in different.items()}
        texts = [shown[repr(value)] for value in values]
        usual, count = Counter(texts).most_common(1)[0]
        for name, text in zip(known, texts, strict=True):
            if text != usual or 2 * count <= len(texts):
                found[name][key] = text
    return found


def _shown(key: str, value: Any) -> str:
    text = as_yaml(masked_value(key, value))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _read(run: Run, known: _Known) -> bool:
    """Read what has changed. True if the run is new, or its configuration has changed."""
    kind = is_fine_tuning(run)
    files = run.metrics_files()
    seen = (kind, *(files.get(name) for name in ("learner", "evaluation")))
    config = _file_state(run)
    is_changed = known.line is None or config != known.config
    if is_changed:
        known.config, known.values = config, _values(run)
    if is_changed or seen != known.files:
        known.files, known.line = seen, _line(run, kind, known.values)
    return is_changed


def _file_state(run: Run) -> tuple[int, ...]:
    try:
        status = run.config_file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _values(run: Run) -> Mapping[str, Any]:
    with suppress(ConfigError):
        return run.real_values()
    return {}


def _line(run: Run, kind: bool, values: Mapping[str, Any]) -> RunLine:
    first, newest = run.oldest_rows("learner", MOST_STEPS), run.newest_rows("learner", MOST_STEPS)
    evaluations = sorted(run.rows("evaluation"), key=lambda row: row["step"])
    found = {
        name: of_steps(first, newest, metric) if file == "learner" else of_evaluations(evaluations, metric)
        for name, (file, metric) in RESULTS[kind].items()
    }
    steps = values.get("learner.steps")
    return RunLine(
        is_fine_tuning=kind,
        state=STOPPED,
        step=newest[-1]["step"] + 1 if newest else 0,
        steps=steps if isinstance(steps, int) else None,
        results={name: (trend.first, trend.last) for name, trend in found.items() if trend},
        configuration=_choices(kind, values),
        differs={},
        changed=float(newest[-1]["time"]) if newest else 0.0,
    )


def _choices(kind: bool, values: Mapping[str, Any]) -> dict[str, str]:
    keys = ["model.path", "learner.lr", *([] if kind else ["algorithm.advantage.name", "algorithm.loss.name"])]
    return {key: _shown(key, values[key]) for key in keys if key in values}
