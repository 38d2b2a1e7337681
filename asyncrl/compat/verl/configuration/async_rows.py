"""Translates the keys of verl's asynchronous trainers, and computes the numbers of their steps and versions.

These trainers are `fully_async_policy` (section `async_training`), `one_step_off_policy` (section `rollout` alone), and
the modes of `trainer.v1`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.compat.rows import Row, Setting, alias, made, none, used
from asyncrl.compat.verl.configuration.recipes import ASYNC, FULLY_ASYNC, ROLLOUT
from asyncrl.compat.verl.configuration.source import VerlConfig

STALENESS = f"{ASYNC}.staleness_threshold"
SYNC_STEP = f"{ASYNC}.trigger_parameter_sync_step"
REQUIRED = f"{ASYNC}.require_batches"
PARTIAL = f"{ASYNC}.partial_rollout"
TOTAL = f"{ROLLOUT}.total_rollout_steps"
PROMPTS = "actor_rollout_ref.actor.ppo_mini_batch_size"
BATCH = "data.train_batch_size"
MODE, SPAN = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
DEFAULTS = FULLY_ASYNC[ASYNC]
LAG = (
    "verl alternates between generation and training; here both run at once, and training uses data that is at most "
    "replay.max_lag=2 versions old. Set replay.max_lag=0 to alternate"
)


def is_fully_async(source: VerlConfig) -> bool:
    """True if the configuration is for `fully_async_policy`."""
    return any(key.startswith(f"{ASYNC}.") for key in source.given)


def is_one_step_off(source: VerlConfig) -> bool:
    """True if the configuration is for `one_step_off_policy`."""
    return not is_fully_async(source) and any(key.startswith(f"{ROLLOUT}.") for key in source.given)


def prompts_of_step(source: VerlConfig) -> int:
    """The number of prompts that a learner step trains. Raises ValueError: it is less than 1."""
    key = PROMPTS if is_fully_async(source) else BATCH
    prompts = source[PROMPTS] * source[REQUIRED] if is_fully_async(source) else source[BATCH]
    if prompts < 1:
        raise ValueError(f"{key}={source[key]}, but a step needs 1 or more prompts")
    return int(prompts)


def steps_a_version(source: VerlConfig) -> int:
    """The number of learner steps between two versions of the weights. Trainers other than `fully_async_policy` have a
    version for each step."""
    return max(1, int(source[SYNC_STEP])) if is_fully_async(source) else 1


def total_steps(source: VerlConfig) -> int | None:
    """The number of learner steps of `fully_async_policy`, which is a multiple of the steps of a version, and not 0.
    None: only the number of epochs limits the steps."""
    if source.values.get(TOTAL) is None:
        return None
    version = steps_a_version(source)
    return int(max(1, source[TOTAL] // (prompts_of_step(source) * version)) * version)


def _lag(source: VerlConfig) -> Iterator[Setting | str]:
    if is_fully_async(source):
        staleness, version = source[STALENESS], steps_a_version(source)
        lag = max(0, math.ceil(staleness))
        yield "replay.max_lag", lag
        yield "learner.publish_every", version
        yield (
            f"{STALENESS}={staleness}: replay.max_lag={lag} counts whole versions; a version is {SYNC_STEP}={version} "
            "steps, as in verl"
        )
        if not source[PARTIAL]:
            yield f"{PARTIAL}=false: verl waits for all episodes before new weights; here they go on with the new ones"
    elif is_one_step_off(source):
        yield "replay.max_lag", 1
        yield "one_step_off_policy: verl trains each batch one version after it was generated, so replay.max_lag is 1"
    elif source[MODE] == "sync":
        yield LAG
    elif (span := source.values.get(SPAN, source[SPAN])) is None:
        yield f"{SPAN}=null: verl has no limit for the age of the data; replay.max_lag keeps its default 2"
    else:
        lag = max(0, int(span) - 1)
        yield "replay.max_lag", lag
        yield f"{SPAN}={span}: data that spans {span} versions is {lag} versions old, so replay.max_lag is {lag}"


ROWS = (
    made(
        STALENESS,
        "`replay.max_lag`, `learner.publish_every`",
        DEFAULTS["staleness_threshold"],
        "In the recipe `fully_async_policy`: `replay.max_lag` is this number of versions, rounded up.",
        _lag,
    ),
    used(
        SYNC_STEP,
        "`learner.publish_every`",
        DEFAULTS["trigger_parameter_sync_step"],
        "The same value. In verl, `trainer.test_freq` and `save_freq` count versions, so both are multiplied by this "
        "value.",
    ),
    used(
        REQUIRED,
        "`learner.batch_size`, `learner.minibatches`",
        DEFAULTS["require_batches"],
        "A step trains `ppo_mini_batch_size * require_batches` prompts, in `require_batches` minibatches.",
    ),
    used(PARTIAL, "", True, "Episodes that are running when weights change always go on with the new weights."),
    used(
        TOTAL,
        "`learner.steps`",
        None,
        "`learner.steps` is this number of prompts divided by the prompts of a step, rounded down to a multiple "
        "of `learner.publish_every`, but at least `learner.publish_every`. With null, `learner.epochs` is used "
        "instead.",
    ),
    *(alias(f"{ROLLOUT}.{name}", f"actor_rollout_ref.rollout.{name}") for name in ("nnodes", "n_gpus_per_node")),
    none(ROLLOUT, "n", "verl reads `actor_rollout_ref.rollout.n`."),
    Row(
        (f"{ASYNC}.*",),
        "",
        "Rollouts and learner can have GPUs of their own (`cluster.pools`), and the learner starts evaluations.",
    ),
    used(
        MODE,
        "`replay.max_lag`",
        "sync",
        "`sync` leaves asyncrl's default of 2 versions, with which generation and training run at once. Set "
        "`replay.max_lag=0` to alternate. With the other modes, `max_off_policy_threshold` decides.",
    ),
    used(
        SPAN,
        "`replay.max_lag`",
        8,
        "This number minus 1, if `trainer_mode` is not `sync`. verl counts the versions that the data spans: it counts "
        "1 for data of the current version alone.",
    ),
)
