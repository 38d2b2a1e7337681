"""Translates verl's keys that set the loss: the policy loss of section `actor`, its aggregation, and the KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.compat.rows import Setting, made, part, same, used
from asyncrl.compat.verl.configuration.actor_rows import ACTOR, POLICY_LOSS
from asyncrl.compat.verl.configuration.correction_rows import CORRECTION, bounds
from asyncrl.compat.verl.configuration.data_rows import RESPONSE
from asyncrl.compat.verl.configuration.source import VerlConfig

KL_CONTROL = "algorithm.kl_ctrl"
KL_FORMS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
RATIOS = {"vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "clip_cov": "clip_cov"}
"""Maps the names of verl's losses with a lower and an upper clip to asyncrl's names."""
DEFAULT_CLIP = 0.2
MEANS_OF_SEQUENCES = ("sapo", "geo_mean")
"""Losses that verl always aggregates as seq-mean-token-mean."""


def _clips(source: VerlConfig) -> tuple[float, float]:
    """The lower and the upper clip. A side that is not given has the value of `clip_ratio`."""
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
        cap = bounds(source[f"{CORRECTION}.rollout_is_threshold"])[1]
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
            # A default in place of the name would train with another algorithm.
            yield "algorithm.loss", part(str(mode))
            yield (
                f"{POLICY_LOSS}.loss_mode={mode}: the translation does not know this loss of verl. A run uses "
                "asyncrl's loss of this name with its defaults, or refuses the name (docs/algorithms.md lists all; one "
                "of your own is named by its path, as module.Class)"
            )


def aggregated(source: VerlConfig) -> dict[str, Any]:
    mode = source[f"{ACTOR}.loss_agg_mode"]
    if mode == "seq-mean-token-sum-norm":
        return part(mode, norm=source[f"{ACTOR}.loss_scale_factor"] or source[RESPONSE])
    return part(mode)


def _aggregation(source: VerlConfig) -> Iterator[Setting | str]:
    bypass = source[f"{CORRECTION}.bypass_mode"]
    always = source[f"{POLICY_LOSS}.loss_mode"] in MEANS_OF_SEQUENCES and not bypass
    yield "algorithm.aggregation", part("seq-mean-token-mean") if always else aggregated(source)


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
        if source[f"{KL_CONTROL}.type"] == "adaptive" and source[f"{CORRECTION}.bypass_mode"]:
            yield (
                f"{KL_CONTROL}.type=adaptive: the coefficient is fixed, because in bypass mode the KL of the trained "
                "policy is not known in time to adapt it; set algorithm.proximal=recompute and the `target` of "
                "algorithm.kl to adapt it"
            )
        elif source[f"{KL_CONTROL}.type"] == "adaptive":
            params |= {"target": source[f"{KL_CONTROL}.target_kl"], "horizon": source[f"{KL_CONTROL}.horizon"]}
        yield "algorithm.kl", part(_form(form), **params)
    else:
        yield "algorithm.kl", part("none")
        return
    if str(form).removesuffix("+") not in KL_FORMS:
        key = f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"
        yield f"{key}={form}: asyncrl has no KL of this form; use one of {', '.join(dict.fromkeys(KL_FORMS.values()))}"


def _form(given: Any) -> str:
    """Our name of a form of the KL. A form that asyncrl lacks keeps its name, so that a run refuses it."""
    text = str(given)
    form = text.removesuffix("+")
    return KL_FORMS.get(form, form) + ("+" if text.endswith("+") else "")


ROWS = (
    made(
        f"{POLICY_LOSS}.loss_mode",
        "`algorithm.loss`",
        "vanilla",
        "`vanilla` becomes `ppo`, `geo_mean` becomes `gmpo`; other losses have the same name. A name that the "
        "translation does not know is kept: a run uses asyncrl's loss of this name, or refuses the name.",
        _loss,
    ),
    used(
        f"{ACTOR}.clip_ratio",
        "`algorithm.loss`",
        DEFAULT_CLIP,
        "Used in place of `clip_ratio_low` or `clip_ratio_high`, if that key is not given.",
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
        "asyncrl lacks, such as `full`, is kept, so that a run refuses it.",
    ),
    used(
        "algorithm.use_kl_in_reward",
        "`algorithm.kl`",
        False,
        "True becomes `place: reward`. It is ignored if `actor.use_kl_loss` is true.",
    ),
    used("algorithm.kl_penalty", "`algorithm.kl`", "kl", "The form of the KL in the reward."),
    used(
        f"{KL_CONTROL}.type",
        "`algorithm.kl`",
        "fixed",
        "`adaptive` sets `target` and `horizon`. In bypass mode, the coefficient is fixed.",
    ),
    used(f"{KL_CONTROL}.kl_coef", "`algorithm.kl`", 0.001, "`weight` of the KL in the reward."),
    used(f"{KL_CONTROL}.horizon", "`algorithm.kl`", 10000, "`horizon`, only with `adaptive`."),
    used(f"{KL_CONTROL}.target_kl", "`algorithm.kl`", 0.1, "`target`, only with `adaptive`."),
)
