"""Changes of the configuration when a run resumes: the allowed changes, and the value of a key at each learner step.

A change applies from the first step whose batch was not yet chosen and recorded at the time of the change. Earlier
steps keep the old value, even if a learner trains them again. So a step has the same values each time that it is
trained.
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
from asyncrl.config.schema.scoring import ScoringConfig, needs
from asyncrl.config.secrets import masked_value, shown, shown_value
from asyncrl.errors import ConfigError

KEYS = tuple(key for key, option in OPTIONS.items() if not is_dataclass(option.type))
"""The keys that hold a single value. A part of the algorithm, such as `algorithm.loss`, has two such keys: its name and
its parameters."""
STEP_SECTIONS = ("learner", "critic", "implicit", "algorithm")
"""The sections that a learner step reads. All other keys affect only the data that the replay records."""
ADDRESSES = ("network", "run.dir")
"""Sections and keys of addresses and folders. A change in them does not count as a change of the run."""
HOST_KEYS = ("learner.node", "learner.rendezvous", "learner.interface", "learner.memory", "model.copies")
"""Keys whose values may differ between the hosts of a learner. A change of such a key does not count as a change of the
run."""

KIND_KEYS = {
    "rules": ("scoring.rule", "scoring.rules"),
    "steps": ("scoring.steps",),
    "outcome_model": ("scoring.outcome_model.path", "scoring.outcome_model.family"),
    "prm": ("scoring.prm.path", "scoring.prm.family"),
}
"""The keys that decide which data sources need a kind of scoring. A resumed run may change such a key only if each
source needs the same kinds as before. The keys of managers never change."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A changed key: `new` applies from learner step `step` on. `time` is the time of the change, in seconds since
    1970."""

    step: int
    key: str
    old: Any
    new: Any
    time: int

    @property
    def text(self) -> str:
        """The change as a text for people, with masked secrets."""
        return f"{self.key} {shown_value(self.key, self.old)} -> {shown_value(self.key, self.new)}"


def with_steps(key: str, value: str, changes: Sequence[ConfigChange]) -> str:
    """Return `value`, the text of a key's value. If the key changed in mid-run, return its first value, and each later
    value with the step from which it applies."""
    own = [each for each in changes if each.key == key]
    if not own:
        return value
    later = (f"{shown_value(key, each.new)} from step {each.step}" for each in own)
    return ", then ".join((shown_value(key, own[0].old), *later))


def values_of(config: TrainConfig) -> dict[str, Any]:
    """The value of every key, made of plain lists, mappings, texts and numbers."""
    return dict(_found(asdict(config)))


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all keys as a store keeps them: secrets are masked, except in the sections that a learner step
    reads."""
    return {key: value if key.startswith(STEP_SECTIONS) else masked_value(key, value) for key, value in values.items()}


def by_key(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Like `values_of`, for a configuration of plain mappings. A missing key gets its default value."""
    return {**values_of(TrainConfig()), **dict(_found(nested))}


def _found(nested: Any) -> Iterator[tuple[str, Any]]:
    for key in KEYS:
        try:
            value = reduce(getitem, key.split("."), nested)
        except (KeyError, TypeError):
            continue
        yield key, value


def require_values(values: Mapping[str, Any]) -> None:
    """Raises ConfigError: in `values`, a key is missing or unknown, or its value is not allowed."""
    wrong = sorted(values.keys() ^ set(KEYS)) or [
        key for key in KEYS if OPTIONS[key].type != list[PartConfig] and not OPTIONS[key].allows(values[key])
    ]
    if wrong:
        raise ConfigError(f"{wrong[0]} is missing, unknown or wrong: use one version of asyncrl for all roles")


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, and whose change counts as a change of the run (`is_of_run`). `before` and `after`
    have all keys.

    Raises ConfigError: the run must keep the value of some of these keys. The message has a line for each of them.
    """
    keys = [key for key in KEYS if before[key] != after[key] and is_of_run(key)]
    # A secret may change: a service can stay the same while its password is replaced.
    seen = [key for key in keys if masked_value(key, before[key]) != masked_value(key, after[key])]
    refused = {key: OPTIONS[key].fixed for key in seen if OPTIONS[key].fixed}
    givers = [giver for kind in _changed_kinds(before, after) for giver in KIND_KEYS.get(kind, ())]
    given = [key for key in keys if key in givers]
    refused |= dict.fromkeys(given, "stored episodes wait for the kinds of scores that the run began with")
    if refused:
        lines = (
            f"{shown(key, after[key])}: it was {shown_value(key, before[key])}; {why}" for key, why in refused.items()
        )
        raise ConfigError(
            "\n".join(
                (
                    "the run began with other values of these keys, and must keep its values (docs/faults.md):",
                    *lines,
                    "set these back to resume the run, or choose another run.name",
                )
            )
        )
    return keys


def is_of_run(key: str) -> bool:
    """True if a change of the key counts as a change of the run. Keys of addresses, and keys that may differ between
    hosts, do not count."""
    return key not in HOST_KEYS and not key.startswith(ADDRESSES)


def _changed_kinds(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The kinds of scoring that some data source needs with one of the two configurations, but not with the other."""
    old, new = _scoring(before), _scoring(after)
    sources = {"", *(source for each in (old, new) for source in (*each.rules, *each.manager.sources, *each.needs))}
    return {kind for source in sources for kind in {*needs(old, source)} ^ {*needs(new, source)}}


def _scoring(values: Mapping[str, Any]) -> ScoringConfig:
    scoring = {key: value for key, value in values.items() if key.startswith("scoring.")}
    return with_values(TrainConfig(), scoring).scoring


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
    """The configuration of a run, and its recorded changes in their order."""

    config: TrainConfig
    changes: Sequence[ConfigChange] = ()

    def configs(self) -> list[TrainConfig]:
        """The different configurations with which steps are trained, in order."""
        return [*self.by_step().values()]

    def by_step(self) -> dict[int, TrainConfig]:
        """The configurations, each by the first step at which it applies."""
        return {step: self.at(step) for step in sorted({0, *(each.step for each in self.changes)})}

    def at(self, step: int) -> TrainConfig:
        """The configuration with which a learner trains `step`.

        A key has the value that the run recorded for this step. But a value in `config` that the run never recorded for
        the key is new, and applies to every step. So a run can be trained again with other values.
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
