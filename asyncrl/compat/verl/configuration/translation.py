"""Translates a configuration of verl into settings of asyncrl, and reports the differences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.compat.report import Table, Translated
from asyncrl.compat.verl.configuration.recipes import recipe_of, with_recipe
from asyncrl.compat.verl.configuration.references import has_reference, is_reference
from asyncrl.compat.verl.configuration.reward_rows import KWARGS
from asyncrl.compat.verl.configuration.sections import Section, leaves, set_key, without, written_at
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.configuration.table import TABLE, row_of

CLASS = "_target_"
"""A key that names the class of the object that verl makes from a section."""
DEFAULTS: Mapping[str, Any] = {key: value for row in TABLE for key, value in row.defaults.items()}
"""verl's default values."""
USUAL: Mapping[str, tuple[Any, ...]] = {
    "actor_rollout_ref.actor.clip_ratio_low": (0.2,),
    "actor_rollout_ref.actor.clip_ratio_high": (0.2,),
    "actor_rollout_ref.actor.optim.clip_grad": (1.0,),
    "actor_rollout_ref.actor.optim.optimizer": ("adam", "adamw"),
    "actor_rollout_ref.actor.optim.name": ("AdamW",),
    "actor_rollout_ref.actor.optim.lr_decay_style": ("constant",),
    **{f"actor_rollout_ref.actor.{engine}.dtype": ("bfloat16",) for engine in ("megatron", "torchtitan")},
    **{f"actor_rollout_ref.actor.{engine}.router_replay.mode": ("disabled",) for engine in ("megatron", "veomni")},
    "reward.reward_manager.name": ("dapo",),
}
"""Values that the report does not list as without effect, although they change nothing. They are in addition to verl's
defaults. Most are verl's defaults for its other engines."""
_VERL = Table(TABLE, row_of, "verl", "verl 0.9's ppo_trainer.yaml")


def translate(given: Section) -> Translated:
    """Translate a configuration of verl. Keys that it does not name have verl's defaults."""
    source, recipe = _read(given), recipe_of(given)
    settings, differs = _made(source)
    left = [key for key in source.given if not key.endswith(CLASS) and not _is_passed_on(key, settings)]
    changed = [key for key in _changed(given, recipe, source) if key in left]
    idle = _without_effect(changed, given, settings, differs)
    return _VERL.translated(source, left, settings, differs, idle)


def _read(given: Section) -> VerlConfig:
    return VerlConfig(_renamed(with_recipe(given)), DEFAULTS)


def _made(source: VerlConfig) -> tuple[dict[str, Any], list[str]]:
    """The settings, and the lines about values that cannot be copied exactly."""
    settings: dict[str, Any] = {}
    differs = [*source.remarks]
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
    return settings, differs


def _changed(given: Section, recipe: Section, source: VerlConfig) -> Iterator[str]:
    """The given keys that have a counterpart, and whose value is neither verl's default, nor the recipe's, nor in
    USUAL. Keys whose value is a reference are left out."""
    for key, written in leaves(given):
        row = row_of(key)
        if row is None or row.is_without or is_reference(written) or (value := source.values.get(key)) is None:
            continue
        of_recipe, newer = written_at(recipe, key), row.alias_of or key
        usual = DEFAULTS.get(newer) if of_recipe is None else of_recipe
        if value not in (usual, {}, [], *USUAL.get(newer, ())):
            yield key


def _without_effect(
    keys: Sequence[str], given: Section, settings: Mapping[str, Any], differs: Sequence[str]
) -> list[str]:
    """Return those of `keys` that can be left out together. Settings and lines then stay the same."""
    idle, rest = [], given
    for key in keys:
        shorter = without(rest, key)
        # Of two keys that ask for the same thing, only the first can be left out.
        if _made(_read(shorter)) == (settings, differs):
            idle.append(key)
            rest = shorter
    return idle


def _is_own(key: str) -> bool:
    """True for a key directly in the section `data` that verl does not define."""
    return key.startswith("data.") and key.count(".") == 1 and row_of(key) is None


def _is_passed_on(key: str, settings: Mapping[str, Any]) -> bool:
    """True if a dataset or a reward manager of the user's gets the key."""
    if key.startswith(f"{KWARGS}."):
        return "scoring.manager.params" in settings
    return "data.dataset" in settings and _is_own(key)


def _renamed(given: Section) -> Section:
    """The configuration with the values of older keys copied to their newer names, which they override."""
    content = copy.deepcopy(given)
    for row in TABLE:
        if row.alias_of and (value := written_at(given, row.there[0])) is not None:
            set_key(content, row.alias_of, value)
    return content
