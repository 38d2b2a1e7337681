"""Collects all keys of the configuration from the schema."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from asyncrl.config.option import Option, options
from asyncrl.config.schema import TrainConfig

TASK_SUFFIXES = (".parquet", ".jsonl", ".json")
"""The endings of files of tasks."""
MISSPELT = 0.9
"""The least similarity, as difflib counts it, of a misspelt word to the right one."""


def sections(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A section and all sections in it, each with the prefix of its keys, such as `replay.filter.`."""
    yield prefix, section
    declared = {option.name for option in options(type(section))}
    for name, inner in vars(section).items():
        if name not in declared and is_dataclass(inner):
            yield from sections(inner, f"{prefix}{name}.")


def _all() -> Iterator[tuple[str, Option]]:
    for prefix, section in sections(TrainConfig()):
        for option in options(type(section)):
            yield prefix + option.name, option
            if isinstance(option.type, type) and is_dataclass(option.type):
                for inner in options(option.type):
                    # If a part of the algorithm is fixed, its name is fixed, but its parameters are not.
                    fixed = option.fixed if inner.name == "name" else inner.fixed
                    yield f"{prefix}{option.name}.{inner.name}", replace(inner, fixed=fixed)


OPTIONS: Mapping[str, Option] = dict(_all())
"""Every option by its key. The name and the parameters of a part, such as `algorithm.loss.name`, are options too."""

SECTIONS = {key.rpartition(".")[0] for key in OPTIONS}
"""The keys that hold other keys."""


def option_of(key: str) -> Option | None:
    """The option of a key, or the option of the mapping that contains the key. `None` for an unknown key."""
    parent = key
    while parent and parent not in OPTIONS:
        parent = parent.rpartition(".")[0]
    option = OPTIONS.get(parent)
    return option if option and (parent == key or get_origin(option.type) is dict) else None


def near_path(path: str, suffixes: Collection[str] = TASK_SUFFIXES) -> str:
    """A text such as `; did you mean data/train.jsonl?` for a path that does not exist. Empty if nothing of its kind in
    its folder has a similar name.

    `suffixes` are the endings of the files that may take its place. If its folder has files with the path's own ending,
    and this is none of `suffixes`, only these may. Folders may take the place of any path.
    """
    suffix = Path(path).suffix
    try:
        found = sorted(Path(path).parent.iterdir(), key=lambda each: (each.suffix == suffix, each.name))
        is_other = suffix and suffixes and suffix not in suffixes and any(each.suffix == suffix for each in found)
        kinds = (suffix,) if is_other else suffixes
        known = {each.stem: str(each) for each in found if each.suffix in kinds or each.is_dir()}
    except OSError:
        return ""
    near = nearest(Path(path).stem, known)
    return f"; did you mean {known[near]}?" if near else ""


def nearest(word: str, known: Collection[str], least: float = 0.6) -> str:
    """The known word that is most similar to an unknown one. Empty if none is similar. `least` is the similarity that
    the known word must have, from 0 to 1."""
    return next(iter(difflib.get_close_matches(word, known, 1, least)), "")


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A text such as `; did you mean learner.lr?` for an unknown word. Empty if no known word is similar."""
    same_name = [each for each in dict.fromkeys(known) if "." not in word and each.rpartition(".")[2] == word]
    near = same_name[:3] or difflib.get_close_matches(word, known, 1)
    return f"; did you mean {' or '.join(near)}?" if near else ""
