"""Translates the keys of verl's section `algorithm` that weight, reject or filter episodes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.compat.rows import Setting, alias, made, none, part, used
from asyncrl.compat.verl.configuration.actor_rows import POLICY_LOSS
from asyncrl.compat.verl.configuration.data_rows import FILTER
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.rewards.process_keys import KEYS

CORRECTION = "algorithm.rollout_correction"
BY_SEQUENCE = ("gspo", "geo_mean")
"""Losses with one ratio per sequence."""
OLDER_SPANS = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}
"""Maps each value of `rollout_rs` in verl 0.6 to the value of our parameter `over`."""
MANAGER = "reward.reward_manager"
REWARD_MODEL = "reward.reward_model"
OF_GROUPS = ("batch", "gdpo", "rate_limited")
"""verl's managers that no rule of asyncrl replaces. They judge whole groups."""
OF_FUNCTION = ("acc", "score")
"""Metrics by which verl filters groups. They leave out the penalty on long responses."""
OF_BATCH = ("reward", "seq_reward", "seq_final_reward")
"""Metrics by which verl filters groups. They include the penalty on long responses. The last two are of earlier
releases."""


def bounds(threshold: Any) -> tuple[float | None, float]:
    """The lower and upper bound of a text `LOWER_UPPER`. A single number is the upper bound."""
    low, sign, high = str(threshold).partition("_")
    return (float(low), float(high)) if sign else (None, float(low))


def _correction(source: VerlConfig) -> Iterator[Setting | str]:
    level, bypass = source[f"{CORRECTION}.rollout_is"], source[f"{CORRECTION}.bypass_mode"]
    if level is True:
        level = source["algorithm.rollout_is_level"]
    by_sequence = source[f"{POLICY_LOSS}.loss_mode"] in BY_SEQUENCE and not bypass
    if by_sequence and level == "token":
        yield f"{CORRECTION}.rollout_is=token: this loss has one ratio per sequence, so the level is geometric"
        level = "geometric"
    if bypass:
        yield "algorithm.proximal", "behaviour"
    weights: list[dict[str, Any]] = []
    if level and not bypass:
        low, high = bounds(source[f"{CORRECTION}.rollout_is_threshold"])
        weights = [part("truncate", level=level, cap=high)]
        if low is not None:
            weights = [part("mask", level=level, low=low, high=high)]
        if source[f"{CORRECTION}.rollout_is_batch_normalize"]:
            weights.append(part("normalise"))
    elif not bypass:
        weights = [part("truncate", level="geometric" if by_sequence else "token", cap=2.0)]
        yield (
            f"{CORRECTION}.rollout_is is null: episodes may be older than the policy that trains on them, so "
            "importance weights are truncated at 2, as by default"
        )
    dropping = [*_rejections(source), *_vetoes(source)]
    if dropping and bypass:
        yield (
            f"{CORRECTION}.bypass_mode=true: rejections are left out. They compare the proximal with the behaviour "
            "policy, and in this mode the two are the same; set algorithm.proximal=recompute to keep them"
        )
        dropping = []
    yield "algorithm.correction", [*weights, *dropping]


def _rejections(source: VerlConfig) -> Iterator[dict[str, Any]]:
    names = [name.strip() for name in str(source[f"{CORRECTION}.rollout_rs"] or "").split(",") if name.strip()]
    given = source[f"{CORRECTION}.rollout_rs_threshold"]
    thresholds = [] if given is None else str(given).split(",")
    for number, name in enumerate(names):
        over, _, form = name.rpartition("_")
        threshold = thresholds[min(number, len(thresholds) - 1)] if thresholds else "2.0"
        if name in OLDER_SPANS:
            yield _older(name, threshold.strip(), source)
            continue
        low, high = bounds(threshold.strip())
        span = over.replace("seq", "sequence")
        if form == "k1":
            # verl bounds -log(ratio) by the logarithms of the two thresholds.
            limits = {"low": math.log(low or 1 / high), "high": math.log(high)}
            yield part("reject", by="k1", over=span, **limits)
        else:
            yield part("reject", by=form, over=span, high=high)


def _older(name: str, threshold: str, source: VerlConfig) -> dict[str, Any]:
    """A rejection from an older release of verl, whose bounds are ratios instead of logarithms."""
    low, high = bounds(threshold)
    low = source[f"{CORRECTION}.rollout_rs_threshold_lower"] or low or 1 / high
    return part("reject", by="k1", over=OLDER_SPANS[name], low=-math.log(high), high=-math.log(low))


def _vetoes(source: VerlConfig) -> Iterator[dict[str, Any]]:
    if threshold := source[f"{CORRECTION}.rollout_token_veto_threshold"]:
        yield part("veto", threshold=threshold)


def _groups(source: VerlConfig) -> Iterator[Setting | str]:
    if not source[f"{FILTER}.enable"]:
        return
    yield "replay.filter.zero_variance", True
    metric = source[f"{FILTER}.metric"]
    if metric == "seq_final_reward" and source["algorithm.use_kl_in_reward"]:
        yield f"{FILTER}.metric={metric}: the KL in the reward does not count when groups are compared"
    if metric in OF_BATCH:
        return
    has_scorer = judged_by_manager(source) or source["reward.custom_reward_function.path"]
    # Without a function of the user's, a rule of asyncrl judges, which gives one score.
    yield "replay.filter.score", "outcome" if metric == "acc" or not has_scorer else score_name(source, metric)
    if metric not in OF_FUNCTION and not has_scorer:
        yield (
            f"{FILTER}.metric={metric}: asyncrl's rules do not give this number, so outcomes are compared; a function "
            f"of yours that gives it is compared by replay.filter.score=rule/NAME/{metric}"
        )


def judged_by_model(source: VerlConfig) -> bool:
    """True if the reward model alone judges the episodes: verl calls neither a function nor a manager then."""
    return bool(
        source[f"{REWARD_MODEL}.enable"]
        and not source["reward.custom_reward_function.path"]
        and source[f"{MANAGER}.name"] not in KEYS
    )


def judged_by_manager(source: VerlConfig) -> bool:
    """True if a reward manager judges the episodes, instead of a rule."""
    return not judged_by_model(source) and (has_own_manager(source) or source[f"{MANAGER}.name"] in OF_GROUPS)


def has_own_manager(source: VerlConfig) -> bool:
    """True if a class of the user's judges the episodes."""
    return source[f"{MANAGER}.source"] == "importlib" and bool(source[f"{MANAGER}.module.path"])


def score_name(source: VerlConfig, key: str) -> str:
    """The name by which labels have the number `key` from the result of a reward function."""
    scorer = "manager" if judged_by_manager(source) else f"rule/{source['reward.custom_reward_function.name']}"
    return scorer if key == "score" else f"{scorer}/{key}"


OLD: Mapping[str, str] = {
    "rollout_is": "rollout_is",
    "rollout_is_threshold": "rollout_is_threshold",
    "rollout_rs": "rollout_rs",
    "rollout_rs_threshold": "rollout_rs_threshold",
    "rollout_rs_threshold_lower": "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold": "rollout_token_veto_threshold",
}
ROWS = (
    made(
        f"{CORRECTION}.rollout_is",
        "`algorithm.correction`",
        None,
        "`truncate` for each token or each sequence, as given, or `mask` if `rollout_is_threshold` has two bounds. A "
        "loss with one ratio a sequence turns `token` into `geometric`. null becomes `truncate` with `cap=2`, because "
        "episodes may be older than the policy that trains on them. In bypass mode, no correction sets weights.",
        _correction,
    ),
    used(
        f"{CORRECTION}.rollout_is_threshold",
        "`algorithm.correction`",
        2.0,
        "`cap` of `truncate` and `optimal_token_baseline`, or `low` and `high` of `mask`.",
    ),
    used(f"{CORRECTION}.rollout_is_batch_normalize", "`algorithm.correction`", False, "Adds `normalise`."),
    used(f"{CORRECTION}.rollout_rs", "`algorithm.correction`", None, "Each name becomes a `reject`."),
    used(
        f"{CORRECTION}.rollout_rs_threshold",
        "`algorithm.correction`",
        None,
        "`high` of `reject`. For k1, `low` and `high` are the logarithms of the two bounds; a missing lower bound is 1 "
        "divided by the upper one.",
    ),
    used(
        f"{CORRECTION}.rollout_rs_threshold_lower",
        "`algorithm.correction`",
        None,
        "The lower bound if `rollout_rs` is `token`, `sequence` or `geometric`, as in older releases.",
    ),
    used(f"{CORRECTION}.rollout_token_veto_threshold", "`algorithm.correction`", None, "Adds `veto`."),
    used(
        f"{CORRECTION}.bypass_mode",
        "`algorithm.proximal`",
        False,
        "True becomes `behaviour`, and leaves `algorithm.correction` empty.",
    ),
    used(
        f"{CORRECTION}.loss_type",
        "`algorithm.loss`",
        "ppo_clip",
        "Used in bypass mode only: `reinforce` is kept if `rollout_is` is set; otherwise it becomes `gpg`.",
    ),
    used("algorithm.rollout_is_level", "`algorithm.correction`", "token", "The level if `rollout_is` is true."),
    *(alias(f"algorithm.{old}", f"{CORRECTION}.{new}") for old, new in OLD.items()),
    made(
        f"{FILTER}.enable",
        "`replay.filter.zero_variance`",
        False,
        "Groups whose members all have the same score are counted and replaced by new groups.",
        _groups,
    ),
    used(
        f"{FILTER}.metric",
        "`replay.filter.score`",
        "reward",
        "`reward`, `seq_reward` and `seq_final_reward` become `reward`, which includes the penalty on long responses "
        "but no KL. `acc` becomes `outcome`, and `score` becomes `rule/NAME`, the score of your function NAME, without "
        "that penalty. Another key of the function's result becomes `rule/NAME/KEY`. With a manager, `manager` takes "
        "the place of `rule/NAME`; without a function or manager of yours, `outcome` is used.",
    ),
    none(
        FILTER,
        "max_num_gen_batches max_inflight_gen_batches",
        "New groups are started until the batch is full.",
    ),
    none("algorithm", "use_pf_ppo pf_ppo.*", "`replay.sampler.kind=prioritised` prefers groups by their rewards."),
    none(POLICY_LOSS, "rollout_correction.*", "Only `algorithm.rollout_correction` is read."),
)
