"""Translates the keys of verl's section `algorithm`, and the keys of section `actor` that set the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.compat.rows import Setting, alias, made, none, same, used
from asyncrl.compat.verl.configuration.actor_rows import ACTOR, ESTIMATOR
from asyncrl.compat.verl.configuration.data_rows import RESPONSE
from asyncrl.compat.verl.configuration.source import VerlConfig

POLICY_LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"
NAMED = "algorithm.gdpo_reward"
KL_CONTROL = "algorithm.kl_ctrl"
PLAIN = {
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "remax": "remax",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
KL_FORMS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
RATIOS = {"vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "clip_cov": "clip_cov"}
"""verl's losses with a lower and an upper clip, each with asyncrl's name."""
DEFAULT_CLIP = 0.2
BY_SEQUENCE = ("gspo", "geo_mean")
"""Losses with one ratio per sequence."""
OLDER_SPANS = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}
"""Values of `rollout_rs` in verl 0.6, each with our parameter `over`."""
MEANS_OF_SEQUENCES = ("sapo", "geo_mean")
"""Losses that verl always aggregates as seq-mean-token-mean."""


FILTER = "algorithm.filter_groups"
OF_FUNCTION = ("acc", "score")
"""Metrics by which verl filters groups, without the penalty on long responses."""
OF_BATCH = ("seq_reward", "seq_final_reward")
"""Metrics by which verl filters groups, with that penalty."""


def part(name: str, **params: Any) -> dict[str, Any]:
    """The setting of a loss, an advantage or another part of the algorithm."""
    return {"name": name, "params": params} if params else {"name": name}


def _advantage(source: VerlConfig) -> Iterator[Setting | str]:
    name, gamma = source[ESTIMATOR], source["algorithm.gamma"]
    scaled = source["algorithm.norm_adv_by_std_in_grpo"]
    match name:
        case "gae":
            yield "algorithm.advantage", part("gae", gamma=gamma, lam=source["algorithm.lam"], whiten=True)
        case "grpo" | "grpo_vectorized":
            yield "algorithm.advantage", part("grpo", normalise_std=scaled)
        case "grpo_passk":
            yield "algorithm.advantage", part("grpo_passk", normalise_std=scaled)
        case "reinforce_plus_plus":
            yield "algorithm.advantage", part("reinforce_pp", gamma=gamma)
        case "optimal_token_baseline" | "tir_optimal_token_baseline":
            turns = name.startswith("tir")
            capped = {"cap": _bounds(source[f"{CORRECTION}.rollout_is_threshold"])[1]} if _weighs_tokens(source) else {}
            yield "algorithm.advantage", part("optimal_token_baseline", gamma=gamma, multi_turn=turns, **capped)
        case "gdpo":
            yield from _named_rewards(source)
        case _ if name in PLAIN:
            yield "algorithm.advantage", part(PLAIN[name])
        case _:
            yield "algorithm.advantage", part("grpo")
            yield f"{ESTIMATOR}={name}: asyncrl lacks this advantage and uses grpo (docs/algorithms.md lists all)"
    if name == "remax":
        yield "algorithm.greedy_sibling", True
    if name == "gae":
        yield "algorithm.value_aggregation", _aggregated(source)


def _named_rewards(source: VerlConfig) -> Iterator[Setting | str]:
    keys, weights = source[f"{NAMED}_keys"], source[f"{NAMED}_weights"]
    if not keys or len(weights or keys) != len(keys):
        yield "algorithm.advantage", part("gdpo", weights={"outcome": 1.0})
        yield f"{NAMED}_keys={keys} and _weights={weights}: set {{SCORE: WEIGHT}} in algorithm.advantage.params.weights"
        return
    of_manager = (
        source["reward.reward_manager.name"] == "batch" or source["reward.reward_manager.source"] == "importlib"
    )
    scorer = "manager" if of_manager else f"rule/{source['reward.custom_reward_function.name']}"
    names = [scorer if key == "score" else f"{scorer}/{key}" for key in keys]
    yield "algorithm.advantage", part("gdpo", weights=dict(zip(names, weights or [1.0] * len(keys), strict=True)))


def _weighs_tokens(source: VerlConfig) -> bool:
    """True if verl computes a weight of each token before the update."""
    return source[f"{CORRECTION}.rollout_is"] == "token" and not source[f"{CORRECTION}.bypass_mode"]


def _clips(source: VerlConfig) -> tuple[float, float]:
    """The lower and the upper clip. A side that is not given is `clip_ratio`."""
    both = source[f"{ACTOR}.clip_ratio"]
    low, high = (source[f"{ACTOR}.clip_ratio_{side}"] for side in ("low", "high"))
    return (both if low is None else low), (both if high is None else high)


def _loss(source: VerlConfig) -> Iterator[Setting | str]:
    mode, (low, high) = source[f"{POLICY_LOSS}.loss_mode"], _clips(source)
    dual = source[f"{ACTOR}.clip_ratio_c"]
    if source.says(f"{ACTOR}.clip_ratio") and not source.says(f"{ACTOR}.clip_ratio_low") and low != DEFAULT_CLIP:
        yield (
            f"{ACTOR}.clip_ratio={low}: used, as in older releases of verl; verl 0.9 ignores it and leaves "
            f"clip_ratio_low and clip_ratio_high at {DEFAULT_CLIP}"
        )
    if source[f"{CORRECTION}.bypass_mode"] and source[f"{CORRECTION}.loss_type"] == "reinforce":
        cap = _bounds(source[f"{CORRECTION}.rollout_is_threshold"])[1]
        level = source[f"{CORRECTION}.rollout_is"]
        yield "algorithm.loss", part("reinforce", level=level, cap=cap) if level else part("gpg")
        return
    match mode:
        case "vanilla" | "bypass_mode" | None:
            yield "algorithm.loss", part("ppo", clip_low=low, clip_high=high, dual_clip=dual)
        case "clip_cov":
            covariance = {
                "share": source[f"{POLICY_LOSS}.clip_cov_ratio"],
                "cov_low": source[f"{POLICY_LOSS}.clip_cov_lb"],
                "cov_high": source[f"{POLICY_LOSS}.clip_cov_ub"],
            }
            yield "algorithm.loss", part("clip_cov", clip_low=low, clip_high=high, **covariance)
        case "kl_cov":
            share, weight = source[f"{POLICY_LOSS}.kl_cov_ratio"], source[f"{POLICY_LOSS}.ppo_kl_coef"]
            yield "algorithm.loss", part("kl_cov", share=share, weight=weight)
        case "sapo":
            below, above = source[f"{ACTOR}.tau_neg"], source[f"{ACTOR}.tau_pos"]
            yield "algorithm.loss", part("sapo", tau_pos=above, tau_neg=below)
        case "dppo_tv" | "dppo_kl":
            yield "algorithm.loss", part(mode, delta=high, delta_low=low, cap=dual)
        case "dro":
            beta = source[f"{POLICY_LOSS}.dro_beta"]
            yield "algorithm.loss", part("dro") if beta is None else part("dro", beta=beta)
        case "gpg":
            yield "algorithm.loss", part("gpg")
        case _ if mode in RATIOS:
            yield "algorithm.loss", part(RATIOS[mode], clip_low=low, clip_high=high)
        case _:
            yield "algorithm.loss", part("ppo", clip_low=low, clip_high=high, dual_clip=dual)
            yield f"{POLICY_LOSS}.loss_mode={mode}: asyncrl lacks this loss and uses ppo (docs/algorithms.md lists all)"


def _aggregated(source: VerlConfig) -> dict[str, Any]:
    mode = source[f"{ACTOR}.loss_agg_mode"]
    if mode == "seq-mean-token-sum-norm":
        return part(mode, norm=source[f"{ACTOR}.loss_scale_factor"] or source[RESPONSE])
    return part(mode)


def _aggregation(source: VerlConfig) -> Iterator[Setting | str]:
    bypass = source[f"{CORRECTION}.bypass_mode"]
    always = source[f"{POLICY_LOSS}.loss_mode"] in MEANS_OF_SEQUENCES and not bypass
    yield "algorithm.aggregation", part("seq-mean-token-mean") if always else _aggregated(source)


def _kl(source: VerlConfig) -> Iterator[Setting | str]:
    in_loss, in_reward = source[f"{ACTOR}.use_kl_loss"], source["algorithm.use_kl_in_reward"]
    if in_loss:
        form = source[f"{ACTOR}.kl_loss_type"]
        weight = source[f"{ACTOR}.kl_loss_coef"]
        yield "algorithm.kl", part(_form(form), weight=weight, place="loss")
        if in_reward:
            yield "algorithm.use_kl_in_reward=true: ignored, because actor.use_kl_loss puts the KL into the loss"
    elif in_reward:
        form = source["algorithm.kl_penalty"]
        params: dict[str, Any] = {"weight": source[f"{KL_CONTROL}.kl_coef"], "place": "reward"}
        if source[f"{KL_CONTROL}.type"] == "adaptive":
            params |= {"target": source[f"{KL_CONTROL}.target_kl"], "horizon": source[f"{KL_CONTROL}.horizon"]}
        yield "algorithm.kl", part(_form(form), **params)
    else:
        yield "algorithm.kl", part("none")
        return
    if str(form).removesuffix("+") not in KL_FORMS:
        yield f"the KL {form} has no counterpart: k3 is used"


def _form(given: Any) -> str:
    text = str(given)
    return KL_FORMS.get(text.removesuffix("+"), "k3") + ("+" if text.endswith("+") else "")


def _bounds(threshold: Any) -> tuple[float | None, float]:
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
        low, high = _bounds(source[f"{CORRECTION}.rollout_is_threshold"])
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
            f"{CORRECTION}.bypass_mode=true: rejections are left out, because the proximal policy that they compare "
            "with the behaviour policy is the same here; set algorithm.proximal=recompute to keep them"
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
        low, high = _bounds(threshold.strip())
        span = over.replace("seq", "sequence")
        if form == "k1":
            # verl bounds -log(ratio) by the logarithms of the two thresholds.
            bounds = {"low": math.log(low or 1 / high), "high": math.log(high)}
            yield part("reject", by="k1", over=span, **bounds)
        else:
            yield part("reject", by=form, over=span, high=high)


def _older(name: str, threshold: str, source: VerlConfig) -> dict[str, Any]:
    """A rejection from an older release of verl, whose bounds are ratios instead of logarithms."""
    low, high = _bounds(threshold)
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
    if metric in OF_FUNCTION:
        yield "replay.filter.score", "outcome"
    elif metric == "seq_final_reward" and source["algorithm.use_kl_in_reward"]:
        yield f"{FILTER}.metric={metric}: the KL in the reward does not count when groups are compared"
    elif metric not in (None, *OF_BATCH):
        yield "replay.filter.score", "outcome"
        yield (
            f"{FILTER}.metric={metric}: the replay compares the outcomes; to compare this number in the learner, add "
            f"{{name: zero_variance, params: {{score: rule/NAME/{metric}}}}} to algorithm.correction"
        )


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
        ESTIMATOR,
        "`algorithm.advantage`",
        "gae",
        "The advantage of the same method. `gae` trains a critic and whitens advantages; `remax` also sets "
        "`algorithm.greedy_sibling`. An estimator that asyncrl lacks becomes `grpo`, and the report names it.",
        _advantage,
    ),
    used(
        f"{NAMED}_keys",
        "`algorithm.advantage`",
        None,
        "The names in `weights` of `gdpo`, for example `rule/compute_score/format` for the key `format`. An episode "
        "without one of these scores is dead-lettered; verl stops with an error.",
    ),
    used(
        f"{NAMED}_weights",
        "`algorithm.advantage`",
        None,
        "The values in `weights` of `gdpo`; null means 1 for every key.",
    ),
    used(
        "algorithm.gamma", "`algorithm.advantage`", 1.0, "`gamma` of `gae`, `reinforce_pp` or `optimal_token_baseline`."
    ),
    used("algorithm.lam", "`algorithm.advantage`", 1.0, "`lam` of `gae`."),
    used("algorithm.norm_adv_by_std_in_grpo", "`algorithm.advantage`", True, "`normalise_std` of `grpo`."),
    made(
        f"{POLICY_LOSS}.loss_mode",
        "`algorithm.loss`",
        "vanilla",
        "`vanilla` becomes `ppo`, `geo_mean` becomes `gmpo`; other losses have the same name. A loss that asyncrl "
        "lacks becomes `ppo`, and the report names it.",
        _loss,
    ),
    used(
        f"{ACTOR}.clip_ratio",
        "`algorithm.loss`",
        DEFAULT_CLIP,
        "Used for `clip_ratio_low` or `clip_ratio_high` if that key is not given.",
    ),
    used(f"{ACTOR}.clip_ratio_low", "`algorithm.loss`", None, "`clip_low`, or `delta_low` of `dppo_*`."),
    used(f"{ACTOR}.clip_ratio_high", "`algorithm.loss`", None, "`clip_high`, or `delta` of `dppo_*`."),
    used(f"{ACTOR}.clip_ratio_c", "`algorithm.loss`", 3.0, "`dual_clip` of `ppo`, or `cap` of `dppo_*`."),
    used(f"{ACTOR}.tau_pos", "`algorithm.loss`", 1.0, "`tau_pos` of `sapo`."),
    used(f"{ACTOR}.tau_neg", "`algorithm.loss`", 1.05, "`tau_neg` of `sapo`."),
    used(f"{POLICY_LOSS}.clip_cov_ratio", "`algorithm.loss`", 0.0002, "`share` of `clip_cov`."),
    used(f"{POLICY_LOSS}.clip_cov_lb", "`algorithm.loss`", 1.0, "`cov_low` of `clip_cov`."),
    used(f"{POLICY_LOSS}.clip_cov_ub", "`algorithm.loss`", 5.0, "`cov_high` of `clip_cov`."),
    used(f"{POLICY_LOSS}.kl_cov_ratio", "`algorithm.loss`", 0.0002, "`share` of `kl_cov`."),
    used(f"{POLICY_LOSS}.ppo_kl_coef", "`algorithm.loss`", 0.1, "`weight` of `kl_cov`."),
    used(f"{POLICY_LOSS}.dro_beta", "`algorithm.loss`", None, "`beta` of `dro`."),
    made(
        f"{ACTOR}.loss_agg_mode",
        "`algorithm.aggregation`",
        "token-mean",
        "The same value. The losses `sapo` and `geo_mean` always use `seq-mean-token-mean`.",
        _aggregation,
    ),
    used(
        f"{ACTOR}.loss_scale_factor",
        "`algorithm.aggregation`",
        None,
        "`norm` of `seq-mean-token-sum-norm`; null becomes `data.max_response_length`.",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_weight", 0),
    made(
        f"{ACTOR}.use_kl_loss",
        "`algorithm.kl`",
        False,
        "True becomes `place: loss`.",
        _kl,
    ),
    used(f"{ACTOR}.kl_loss_coef", "`algorithm.kl`", 0.001, "`weight` of the KL in the loss."),
    used(
        f"{ACTOR}.kl_loss_type",
        "`algorithm.kl`",
        "low_var_kl",
        "The form of the KL in the loss: `kl` becomes `k1`, `mse` becomes `k2`, `low_var_kl` becomes `k3`. A form that "
        "asyncrl lacks, such as `full`, becomes `k3`, and the report names it.",
    ),
    used(
        "algorithm.use_kl_in_reward",
        "`algorithm.kl`",
        False,
        "True becomes `place: reward`. It is ignored if `actor.use_kl_loss` is true.",
    ),
    used("algorithm.kl_penalty", "`algorithm.kl`", "kl", "The form of the KL in the reward."),
    used(f"{KL_CONTROL}.type", "`algorithm.kl`", "fixed", "`adaptive` sets `target` and `horizon`."),
    used(f"{KL_CONTROL}.kl_coef", "`algorithm.kl`", 0.001, "`weight` of the KL in the reward."),
    used(f"{KL_CONTROL}.horizon", "`algorithm.kl`", 10000, "`horizon`, only with `adaptive`."),
    used(f"{KL_CONTROL}.target_kl", "`algorithm.kl`", 0.1, "`target`, only with `adaptive`."),
    made(
        f"{CORRECTION}.rollout_is",
        "`algorithm.correction`",
        None,
        "`truncate` at this level, or `mask` if `rollout_is_threshold` has two bounds. null becomes `truncate` at 2, "
        "because episodes may be older than the policy that trains on them.",
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
        "`high` of `reject`. For k1, `low` and `high` are the logarithms of the two bounds.",
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
        "True becomes `behaviour`, and `algorithm.correction` is empty.",
    ),
    used(
        f"{CORRECTION}.loss_type",
        "`algorithm.loss`",
        "ppo_clip",
        "Used in bypass mode: `reinforce` is kept if `rollout_is` is set, else it becomes `gpg`.",
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
        None,
        "`acc` and `score` become `outcome`, which excludes the penalty on long responses. `seq_reward` and "
        "`seq_final_reward` become `reward`, which includes the penalty but no KL. For another metric, use "
        "`zero_variance` of `algorithm.correction`.",
    ),
    none(
        FILTER,
        "max_num_gen_batches max_inflight_gen_batches",
        "New groups are started until the batch is full.",
    ),
    none("algorithm", "use_pf_ppo pf_ppo.*", "`replay.sampler.kind=prioritised` prefers groups by their rewards."),
    none(POLICY_LOSS, "rollout_correction.*", "Only `algorithm.rollout_correction` is read."),
)
