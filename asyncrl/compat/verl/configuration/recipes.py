"""The values that verl's asynchronous trainers change in its configuration.

verl ships two such trainers: `fully_async_policy`, whose keys are in the section `async_training`, and
`one_step_off_policy`. The sections of both are in addition to those of ppo_trainer.yaml.
"""

from __future__ import annotations

import copy
from pathlib import PurePath

from asyncrl.compat.verl.configuration.sections import Section, merged

ASYNC, ROLLOUT = "async_training", "rollout"
_POOL = {"nnodes": 1, "n_gpus_per_node": 8}
_BYPASS = {"rollout_correction": {"bypass_mode": True}}
ONE_STEP_OFF: Section = {ROLLOUT: _POOL, "algorithm": _BYPASS}
FULLY_ASYNC: Section = {
    ASYNC: {
        "staleness_threshold": 0.1,
        "trigger_parameter_sync_step": 4,
        "require_batches": 1,
        "partial_rollout": True,
    },
    ROLLOUT: {**_POOL, "total_rollout_steps": 100},
    "data": {"train_batch_size": 0, "gen_batch_size": 1},
    "algorithm": _BYPASS,
}
RECIPES = {"fully_async_ppo": FULLY_ASYNC, "one_step_off_ppo": ONE_STEP_OFF}
"""The values of configurations that verl ships. A key is the beginning of such a configuration's name."""


def recipe_named(name: str) -> Section:
    """The values by which `name`, a configuration that verl ships, differs from ppo_trainer.yaml."""
    stem = PurePath(name).name
    return next((copy.deepcopy(recipe) for start, recipe in RECIPES.items() if stem.startswith(start)), {})


def recipe_of(given: Section) -> Section:
    """The values of the asynchronous trainer to which a configuration belongs, as its sections show. Empty for verl's
    usual trainer."""
    return FULLY_ASYNC if given.get(ASYNC) else ONE_STEP_OFF if given.get(ROLLOUT) else {}


def with_recipe(given: Section) -> Section:
    """The configuration. Keys that it does not set get the values of its asynchronous trainer."""
    return merged(recipe_of(given), given)
