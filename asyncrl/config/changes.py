"""Changes of a run's configuration: which a resumed run may have, and which value a key has at a learner step.

A change holds from the first step that had no recorded plan when it was made. Earlier steps keep the old value, also
where a learner trains them again. So a step has the same values each time that it is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import reduce
from operator import attrgetter, getitem
from typing import Any

from asyncrl.config.keys import OPTIONS
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.config.schema.scoring import configured
from asyncrl.config.secrets import masked_value, shown, shown_value
from asyncrl.errors import ConfigError

KEYS = tuple(key for key, option in OPTIONS.items() if not is_dataclass(option.type))
"""The keys that have a value of their own."""
STEP_SECTIONS = ("learner", "critic", "implicit", "algorithm")
"""The sections that a learner step reads. Changes of other keys show in what the replay records."""
ADDRESSES = ("network", "run.dir")
"""Keys that say where a run is; their changes are no changes of the run."""
HOST_KEYS = ("learner.node", "learner.rendezvous", "learner.interface", "learner.memory", "model.copies")
"""Keys in which the hosts of a learner differ; their changes are no changes of the run."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A changed key: `new` holds from learner step `step` on. `time` is that of the change, in seconds since 1970."""

    step: int
    key: str
    old: Any
    new: Any
    time: int


def values_of(config: TrainConfig) -> dict[str, Any]:
    """The value of every key, made of plain lists, mappings, texts and numbers."""
    return dict(_found(asdict(config)))


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all keys as a store keeps them: without secrets, but for what a learner step reads."""
    return {key: value if key.startswith(STEP_SECTIONS) else masked_value(key, value) for key, value in values.items()}


def by_key(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a configuration of plain mappings. A key that it lacks has its default."""
    return {**values_of(TrainConfig()), **dict(_found(nested))}


def _found(nested: Any) -> Iterator[tuple[str, Any]]:
    for key in KEYS:
        try:
            value = reduce(getitem, key.split("."), nested)
        except (KeyError, TypeError):
            continue
        yield key, value


def require_values(values: Mapping[str, Any]) -> None:
    """Raises ConfigError: `values` lack a key, have an unknown one, or one with a value that it cannot have."""
    wrong = sorted(values.keys() ^ set(KEYS)) or [
        key for key in KEYS if OPTIONS[key].type != list[PartConfig] and not OPTIONS[key].allows(values[key])
    ]
    if wrong:
        raise ConfigError(f"{wrong[0]} is missing, unknown or wrong: use one version of asyncrl for all roles")


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ; addresses are left out. Both have all keys.

    Raises ConfigError, with a line for each key that a resumed run must keep.
    """
    keys = [key for key in KEYS if before[key] != after[key] and is_of_run(key)]
    # A secret may be another one: the key of a server changes, and the server stays.
    seen = [key for key in keys if masked_value(key, before[key]) != masked_value(key, after[key])]
    refused = {key: OPTIONS[key].fixed for key in seen if OPTIONS[key].fixed}
    if _kinds(before) != _kinds(after):
        models = [key for key in keys if key in ("scoring.prm.path", "scoring.outcome_model.path")]
        refused |= dict.fromkeys(models, "stored episodes wait for the kinds of scores that the run began with")
    if refused:
        lines = (
            f"{shown(key, after[key])}: it was {shown_value(key, before[key])}; {why}" for key, why in refused.items()
        )
        raise ConfigError(
            "\n".join(
                (
                    "the run began with another configuration, of which it keeps these keys (docs/faults.md):",
                    *lines,
                    "set these back to resume the run, or choose another run.name",
                )
            )
        )
    return keys


def is_of_run(key: str) -> bool:
    """True if a key is the same for the whole run: it does not say where a process is."""
    return key not in HOST_KEYS and not key.startswith(ADDRESSES)


def _kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    scoring = {key: value for key, value in values.items() if key.startswith("scoring.")}
    return configured(with_values(TrainConfig(), scoring).scoring)


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """A copy of `config` that has these values."""
    changed = copy.deepcopy(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if OPTIONS[key].type == list[PartConfig]:
            value = [PartConfig(**part) for part in value]
        setattr(attrgetter(section)(changed), name, value)
    return changed


@dataclass(frozen=True, slots=True)
class ConfigHistory:
    """The configuration of a run, and the recorded changes that it had, in their order."""

    config: TrainConfig
    changes: Sequence[ConfigChange] = ()

    def configs(self) -> list[TrainConfig]:
        """Every configuration with which some step is trained."""
        return [*self.by_step().values()]

    def by_step(self) -> dict[int, TrainConfig]:
        """The same, each with the first step from which on it is the one."""
        return {step: self.at(step) for step in sorted({0, *(each.step for each in self.changes)})}

    def at(self, step: int) -> TrainConfig:
        """The configuration with which a learner trains `step`.

        A key has its recorded value. The exception is a key that is set to a value which it never had in the run: it
        keeps that value at every step, so that a run can be trained again with other values.
        """
        changes = [each for each in self.changes if each.key.startswith(STEP_SECTIONS)]
        if not changes:
            return self.config
        known: dict[str, list[Any]] = {}
        values: dict[str, Any] = {}
        for change in changes:
            known.setdefault(change.key, []).extend((change.old, change.new))
            values.setdefault(change.key, change.old)
            if change.step <= step:
                values[change.key] = change.new
        given = values_of(self.config)
        return with_values(self.config, {key: value for key, value in values.items() if given[key] in known[key]})
