"""Translates a configuration of verl into settings of asyncrl, and reports the differences."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from asyncrl.compat.report import Table, Translated
from asyncrl.compat.verl.configuration.references import has_reference
from asyncrl.compat.verl.configuration.reward_rows import KWARGS
from asyncrl.compat.verl.configuration.sections import Section, set_key, written_at
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.configuration.table import TABLE, row_of

CLASS = "_target_"
"""A key that names the class that verl creates from a section."""
LAG = (
    "verl alternates between generation and training; here both run at once, and training uses data that is at most "
    "replay.max_lag=2 versions old. Set replay.max_lag=0 to alternate"
)
_VERL = Table(TABLE, row_of, "verl", "verl 0.9's ppo_trainer.yaml")


def translate(given: Section) -> Translated:
    """Translate a configuration of verl. Keys that it does not name have verl's defaults."""
    defaults = {key: value for row in TABLE for key, value in row.defaults.items()}
    source = VerlConfig(_renamed(given), defaults)
    settings: dict[str, Any] = {}
    differs = [*source.remarks, LAG]
    for made in _VERL.settings(source):
        if isinstance(made, str):
            differs.append(made)
        elif has_reference(made[1]):
            # A run would let Hydra resolve the reference, which may read an environment variable, for example.
            differs.append(f"{made[0]}: its value has a reference, and is left out: set this key yourself")
        else:
            settings[made[0]] = made[1]
    if "data.dataset" in settings:
        # A dataset class of the user's takes parameters that verl does not define.
        settings["data.dataset_params"] = {
            key.removeprefix("data."): source[key] for key in source.given if _is_own(key)
        }
    left = [key for key in source.given if not key.endswith(CLASS) and not _is_passed_on(key, settings)]
    return _VERL.translated(source, left, settings, differs)


def _is_own(key: str) -> bool:
    """True if the key is in the section `data`, but verl does not define it."""
    return key.startswith("data.") and key.count(".") == 1 and row_of(key) is None


def _is_passed_on(key: str, settings: Mapping[str, Any]) -> bool:
    """True if a dataset or a reward manager of the user's gets the key."""
    if key.startswith(f"{KWARGS}."):
        return "scoring.manager.params" in settings
    return "data.dataset" in settings and _is_own(key)


def _renamed(given: Section) -> Section:
    """The configuration with older keys renamed to their newer names."""
    content = copy.deepcopy(given)
    for row in TABLE:
        if row.alias_of and (value := written_at(given, row.there[0])) is not None:
            set_key(content, row.alias_of, value)
    return content
