"""The refusals of a configuration: values that break their option's constraint, combinations that cannot work, and
missing files."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path

from asyncrl.config.checks.conflicts import conflicts
from asyncrl.config.keys import near_path, sections
from asyncrl.config.option import as_yaml, options
from asyncrl.config.schema import DataConfig, TrainConfig
from asyncrl.config.secrets import shown
from asyncrl.masking import MASK

ELSEWHERE = ("hf://", "hub:", "reasoning-gym:")
"""The prefixes of sources of tasks that are not files on this machine."""


def refusals(config: TrainConfig, known_bad: Collection[str] = (), combinations: bool = True) -> list[str]:
    """One line for each value or combination that is not allowed.

    A combination is not checked if one of its values is refused by itself, or if one of its keys is in `known_bad`, the
    keys that were refused before. If `combinations` is false, no combination is checked.
    """
    config, bad, lines = copy.deepcopy(config), set(known_bad), []
    for prefix, section in sections(config):
        for option in options(type(section)):
            key, given = prefix + option.name, getattr(section, option.name)
            if key not in bad and not option.allows(given):
                lines.append(f"{shown(key, given)}: it must be {option.allowed}")
                bad.add(key)
            elif key not in bad and MASK in as_yaml(given):
                lines.append(
                    f"{key}: it contains {MASK}, which asyncrl shows instead of a secret; write the secret itself"
                )
                bad.add(key)
            if key in bad:
                setattr(section, option.name, option.default)
    found = conflicts(config) if combinations else ()
    lines += (refusal_of(each, config) for each in found if bad.isdisjoint(each.partition(": ")[0].split()))
    return lines


def refusal_of(conflict: str, sections: object) -> str:
    """The line for a combination that cannot work, with the values of its keys. `conflict` is `KEY [KEY ...]: FIX`, and
    `sections` is the configuration, or has the sections of these keys."""
    keys, _, fix = conflict.partition(": ")
    return f"{' with '.join(shown(key, attrgetter(key)(sections)) for key in keys.split())}: {fix}"


def missing_data(data: DataConfig, demonstrations: Sequence[str] | None) -> dict[str, str]:
    """An error line for each key of data files that names a missing file. `demonstrations` has the files of
    algorithm.sft.path."""
    sources = {"data.train": data.train, "data.eval": data.eval or [], "algorithm.sft.path": demonstrations or []}
    return {
        key: f"{key}={source}: there is no such file{near_path(source) or '; see docs/data.md'}"
        for key, named in sources.items()
        for source in named
        if not may_exist(source)
    }


def may_exist(source: str) -> bool:
    """True if `source` is an existing file or folder, or a pattern that matches one. Also true for a source on a hub
    and for a generated source, which are not checked."""
    path = Path(source)
    return (
        source.startswith(ELSEWHERE) or path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    )
