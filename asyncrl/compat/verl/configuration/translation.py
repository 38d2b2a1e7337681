"""Translates a configuration of verl into settings of asyncrl, and reports the differences."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from asyncrl.compat.verl.configuration.references import has_reference
from asyncrl.compat.verl.configuration.reward_rows import KWARGS
from asyncrl.compat.verl.configuration.rows import Row, Setting
from asyncrl.compat.verl.configuration.source import Section, VerlConfig, set_key, written_at
from asyncrl.compat.verl.configuration.table import BY_KEY, TABLE, row_of
from asyncrl.config.keys import OPTIONS, did_you_mean
from asyncrl.config.option import as_yaml
from asyncrl.masking import masked

CLASS = "_target_"
"""A key that names the class that verl creates from a section."""
LAG = (
    "verl alternates between generation and training; here both run at once, on data that is at most replay.max_lag=2 "
    "versions old. Set 0 to alternate"
)


@dataclass(frozen=True)
class Translated:
    """The result of a translation.

    - `settings`: our keys with their values
    - `differs`: lines about values that could not be copied exactly
    - `without`: lines about keys without a counterpart
    - `unknown`: lines about keys that the table does not know
    - `off`: keys without a counterpart whose value turns a feature off
    """

    settings: Mapping[str, Any]
    differs: tuple[str, ...]
    without: tuple[str, ...]
    unknown: tuple[str, ...]
    off: tuple[str, ...]

    @property
    def report(self) -> Iterator[str]:
        """The lines of the whole report."""
        parts = {
            "Different here:": self.differs,
            "No counterpart:": self.without,
            "Unknown, and left out:": self.unknown,
            "Turned off in verl, and left out:": (", ".join(self.off),) if self.off else (),
        }
        for title, lines in parts.items():
            if lines:
                yield title
                yield from (f"  {line}" for line in lines)


def translate(given: Section) -> Translated:
    """Translate a configuration of verl. Keys that it does not name have verl's defaults."""
    defaults = {key: value for row in TABLE for key, value in row.defaults.items()}
    source = VerlConfig(_renamed(given), defaults)
    settings: dict[str, Any] = {}
    differs = [*source.remarks, LAG]
    for row in TABLE:
        for made in _made(row, source):
            if isinstance(made, str):
                differs.append(made)
            elif has_reference(made[1]):
                # Hydra would resolve the reference.
                differs.append(f"{made[0]}: its value has a reference, and is left out: set this key yourself")
            else:
                settings[made[0]] = made[1]
    if "data.dataset" in settings:
        # A dataset class of the user's takes parameters that verl does not define.
        settings["data.dataset_params"] = {
            key.removeprefix("data."): source[key] for key in source.given if _is_own(key)
        }
    left = [key for key in source.given if not key.endswith(CLASS) and not _is_passed_on(key, settings)]
    without, off = _without(source, left)
    unknown = [
        f"{_with_value(key, source)}: verl 0.9's ppo_trainer.yaml lacks this key{did_you_mean(key, list(BY_KEY))}"
        for key in left
        if row_of(key) is None
    ]
    order = {key: number for number, key in enumerate(OPTIONS)}
    ordered = dict(sorted(settings.items(), key=lambda each: order.get(each[0], len(order))))
    return Translated(ordered, tuple(differs), tuple(without), tuple(unknown), tuple(off))


def _with_value(key: str, source: VerlConfig) -> str:
    """The key and its value, as `key=value`."""
    # None of verl's own keys is a secret, although some end with `_key` or `_token`.
    return f"{key}={as_yaml(masked(source[key], '' if row_of(key) else key.rpartition('.')[2]))}"


def _is_own(key: str) -> bool:
    """True if the key is in the section `data`, but verl does not define it."""
    return key.startswith("data.") and key.count(".") == 1 and row_of(key) is None


def _is_passed_on(key: str, settings: Mapping[str, Any]) -> bool:
    """True if a dataset or a reward manager of the user's gets the key."""
    if key.startswith(f"{KWARGS}."):
        return "scoring.manager.params" in settings
    return "data.dataset" in settings and _is_own(key)


def _made(row: Row, source: VerlConfig) -> Iterator[Setting | str]:
    try:
        yield from row.translate(source) if row.translate else ()
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        key = row.there[0]
        yield f"{_with_value(key, source)}: this value or a related one is wrong, and is left out: {error}"


def experiment(translated: Translated) -> DictConfig:
    """The settings as the nested keys of an experiment file."""
    content = OmegaConf.create({})
    for key, value in translated.settings.items():
        OmegaConf.update(content, key, value, force_add=True)
    return content


def _renamed(given: Section) -> Section:
    """The configuration with older keys renamed to their newer names."""
    content = copy.deepcopy(given)
    for row in TABLE:
        if row.alias_of and (value := written_at(given, row.there[0])) is not None:
            set_key(content, row.alias_of, value)
    return content


def _without(source: VerlConfig, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The lines about `given` keys without a counterpart, and the keys whose value turns a feature off."""
    lines, off = [], []
    rows = ((key, row) for key in given if (row := row_of(key)) is not None and _has_none(row))
    by_row = sorted(rows, key=lambda each: TABLE.index(each[1]))
    for row, keys in itertools.groupby(by_row, key=lambda each: each[1]):
        named = [key for key, _ in keys]
        said = [key for key in named if source[key] not in (None, False, "", [], {}, -1)]
        off += [key for key in named if key not in said]
        if said:
            lines.append(f"{', '.join(_shown(row, said, source))}: {row.sentence.replace('`', '')}")
    return lines, off


def _shown(row: Row, keys: Sequence[str], source: VerlConfig) -> Iterator[str]:
    """The keys that the row names, each with its value. Keys of a section that the row has as `.*` are counted."""
    whole: Counter[str] = Counter()
    for key in keys:
        sections = [each for each in row.there if each.endswith(".*") and key.startswith(each[:-1])]
        if sections:
            whole[sections[0]] += 1
        else:
            yield f"{_with_value(key, source)}"
    yield from (f"{section} ({number} keys)" for section, number in whole.items())


def _has_none(row: Row) -> bool:
    return not row.here and row.translate is None and not row.defaults
