"""KEY=VALUE of a study's command: changes of the declared settings for all runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.commands.demo.ladder.tasks import RUNGS
from asyncrl.config.compose import parsed, read
from asyncrl.errors import ConfigError
from benchmarks.studies.study import HELD_OUT, RUNG, WARM_START, Levels, Settings, Study, overrides

OWNED: Mapping[str, str] = {
    "run": "the study's command names the folder of each run; --keep keeps it",
    "model": "the study makes the policy of each seed, or --model names it",
    "data": "the study has its own tasks",
    "experiment": "the study has its own",
}
"""Sections of the configuration that only the runner sets, with the reason."""
GIVEN = ("run.name=run", "model.path=policy", "data.train=tasks", "data.eval=tasks")
"""Settings of the runner, for the check of a configuration."""


def changed_settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings, with values as `asyncrl train` reads them. Raises ConfigError: a word is no setting, or its key or
    value is impossible in a run."""
    changed = {}
    for word in words:
        override = parsed(word)
        changed[override.key_or_group] = value = override.value()
        if reason := _refusal(override.key_or_group, value):
            raise ConfigError(f"{word}: {reason}")
    return changed


def _refusal(key: str, value: Any) -> str | None:
    if key in (RUNG, HELD_OUT) and value not in list(RUNGS):
        return f"no such rung; choose one of {', '.join(RUNGS)}"
    if key == WARM_START and (type(value) is not int or value < 0):
        return "it must be a number of updates"
    return OWNED.get(key.partition(".")[0])


def check(study: Study, cells: Iterable[Levels], changed: Settings) -> None:
    """Raises ConfigError: `asyncrl train` would refuse a level's run with these settings, or the study has no rung for
    them."""
    of_rung = {RUNG, HELD_OUT, WARM_START} & changed.keys()
    if study.experiment and of_rung:
        raise ConfigError(f"{', '.join(sorted(of_rung))}: this study trains on {study.experiment}, not on a rung")
    for cell in _of_each_level(cells):
        run = study.run(cell, 0, None, changed)
        read([*GIVEN, *overrides(run.settings, "policy")], names_missing_data=False)


def _of_each_level(cells: Iterable[Levels]) -> Iterator[Levels]:
    """A few cells that together have every level."""
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        if not seen.issuperset(cell.items()):
            seen.update(cell.items())
            yield cell
