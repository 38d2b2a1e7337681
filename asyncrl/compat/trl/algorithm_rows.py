"""Translates the keys of TRL that set the algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.compat.rows import Row, Setting, made, none, part, same, used
from asyncrl.compat.trl.reward_rows import rewards, score_name
from asyncrl.compat.trl.source import TrlConfig
from asyncrl.compat.trl.values import Unread

MODES = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
"""Maps each mode of importance sampling in TRL to our correction and its level."""
MEANS_OF_SEQUENCES = ("grpo", "sapo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_TOKEN = ("cispo", "sapo")
"""Losses that have a ratio for each token, but none for a whole sequence."""
VESPO = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
"""The parameters of the loss `vespo`. TRL's have the prefix `vespo_`."""


def _advantage(source: TrlConfig) -> Iterator[Setting | str]:
    if source["multi_objective_aggregation"] == "normalize_then_sum":
        given = rewards(source)
        weights = source["reward_weights"] or [1.0] * len(given)
        by_name: dict[str, float] = {}
        for each, weight in zip(given, weights, strict=True):
            if not isinstance(each, Unread):
                by_name.setdefault(score_name(each), weight)  # Of several models, the first one is translated.
        yield "algorithm.advantage", part("gdpo", weights=by_name)
        yield (
            "multi_objective_aggregation=normalize_then_sum: every function must give a number for every episode: an "
            "episode for which a function returns None cannot be compared with others"
        )
        return
    scale = {True: "group", False: "none"}.get(source["scale_rewards"], source["scale_rewards"])
    if scale == "batch":
        yield "algorithm.advantage", part("reinforce_pp_baseline")
        yield "scale_rewards=batch: reinforce_pp_baseline divides by the spread of the batch's advantages"
    else:
        yield "algorithm.advantage", part("grpo", normalise_std=scale != "none")


def _clips(source: TrlConfig) -> dict[str, float]:
    high = source["epsilon"] if source["epsilon_high"] is None else source["epsilon_high"]
    return {"clip_low": source["epsilon"], "clip_high": high}


def _by_sequence(source: TrlConfig) -> bool:
    """True if the loss has one ratio for each sequence, and clips it."""
    return source["importance_sampling_level"] == "sequence" and source["loss_type"] not in (*BY_TOKEN, "vespo")


def _loss(source: TrlConfig) -> Iterator[Setting | str]:
    kind = source["loss_type"]
    if kind == "cispo":
        # TRL bounds the ratio itself by epsilon_high, and asyncrl by 1 + clip_high.
        yield "algorithm.loss", part("cispo", clip_low=1.0, clip_high=max(0.0, _clips(source)["clip_high"] - 1))
    elif kind == "sapo":
        yield (
            "algorithm.loss",
            part("sapo", tau_pos=source["sapo_temperature_pos"], tau_neg=source["sapo_temperature_neg"]),
        )
    elif kind == "vespo":
        yield "algorithm.loss", part("vespo", **{name: source[f"vespo_{name}"] for name in VESPO})
    elif _by_sequence(source):
        yield "algorithm.loss", part("gspo", **_clips(source), dual_clip=source["delta"])
    else:
        yield "algorithm.loss", part("ppo", **_clips(source), dual_clip=source["delta"])
    if kind == "luspo" and not _by_sequence(source):
        yield (
            "loss_type=luspo: without importance_sampling_level=sequence, TRL averages over padded tokens; asyncrl "
            "adds the losses of a sequence's own tokens"
        )
    elif kind not in (*CLIPPED, *BY_TOKEN, "vespo"):
        instead = "gspo" if _by_sequence(source) else "ppo"
        yield f"loss_type={kind}: asyncrl lacks this loss and uses {instead} (docs/algorithms.md lists all)"
    if source["delta"] is not None and kind in (*BY_TOKEN, "vespo"):
        yield f"delta={source['delta']}: left out, as in TRL, which does not use it with loss_type={kind}"
    level = source["importance_sampling_level"]
    if level not in ("token", "sequence") or (level == "sequence" and kind in BY_TOKEN):
        yield f"importance_sampling_level={level}: left out, so each token has its own ratio"


def _aggregation(source: TrlConfig) -> Iterator[Setting | str]:
    kind = source["loss_type"]
    if kind == "dr_grpo":
        yield "algorithm.aggregation", part("seq-mean-token-sum-norm", norm=source["max_completion_length"])
    elif kind == "luspo":
        # GSPO averages over the tokens of a sequence. luspo multiplies this mean by the length, which gives the sum.
        yield "algorithm.aggregation", part("seq-mean-token-sum")
    else:
        yield "algorithm.aggregation", part("seq-mean-token-mean" if kind in MEANS_OF_SEQUENCES else "token-mean")


def _kl(source: TrlConfig) -> Iterator[Setting | str]:
    if not source["beta"]:
        yield "algorithm.kl", part("none")
        return
    weighted = bool(source["use_bias_correction_kl"])
    yield "algorithm.kl", part("k3", weight=source["beta"], place="loss", importance_weighted=weighted)


def _correction(source: TrlConfig) -> Iterator[Setting | str]:
    by_sequence = _by_sequence(source)
    corrects = source["use_vllm"] and source["vllm_importance_sampling_correction"]
    if source["loss_type"] == "vespo":
        corrections = []
        if corrects:
            yield (
                "loss_type=vespo: its weight is computed with the exact ratio to the engine's policy; TRL truncates or "
                "masks this ratio"
            )
    elif corrects:
        name, level = MODES.get(source["vllm_importance_sampling_mode"], ("truncate", "token"))
        cap = source["vllm_importance_sampling_cap"] or source["vllm_importance_sampling_clip_max"]
        high, low = cap or float("inf"), source["vllm_importance_sampling_clip_min"] or 0.0
        level = "geometric" if by_sequence and level == "token" else level
        bounds = {"cap": high, "floor": low} if name == "truncate" else {"low": low, "high": high}
        corrections = [part(name, level=level, **bounds)]
    else:
        corrections = [part("truncate", level="geometric" if by_sequence else "token", cap=2.0)]
        yield (
            "importance weights are truncated at 2, as by default, because episodes may be older than the policy that "
            "trains on them"
        )
    if source["off_policy_mask_threshold"] is not None:
        corrections.append(part("opsm", delta=source["off_policy_mask_threshold"]))
    yield "algorithm.correction", corrections


VLLM = "vllm_importance_sampling"
ROWS: tuple[Row, ...] = (
    made(
        "scale_rewards",
        "`algorithm.advantage.params.normalise_std`",
        "group",
        "`group` and true become `grpo`; `none` and false become `grpo` without the division by the group's spread; "
        "`batch` becomes `reinforce_pp_baseline`.",
        _advantage,
    ),
    used(
        "multi_objective_aggregation",
        "`algorithm.advantage`",
        "sum_then_normalize",
        "`normalize_then_sum` becomes `gdpo`, with the names and weights of the functions.",
    ),
    made(
        "loss_type",
        "`algorithm.loss`, `algorithm.aggregation`",
        "dapo",
        "`grpo`, `bnpo`, `dapo` and `dr_grpo` become `ppo` with the aggregation of the same method; `luspo` becomes "
        "`gspo` with `seq-mean-token-sum`; `cispo`, `sapo` and `vespo` keep their names. A loss that asyncrl lacks "
        "becomes `ppo` or `gspo`, and the report names it.",
        _loss,
    ),
    made(
        "importance_sampling_level",
        "`algorithm.loss`, `algorithm.aggregation`",
        "token",
        "`sequence` becomes the loss `gspo`, unless `loss_type` is `vespo`, `cispo` or `sapo`. Ratios of `cispo` and "
        "`sapo` always belong to tokens.",
        _aggregation,
    ),
    used(
        "epsilon", "`algorithm.loss.params.clip_low`, `algorithm.loss.params.clip_high`", 0.2, "The clips of the loss."
    ),
    used(
        "epsilon_high",
        "`algorithm.loss.params.clip_high`",
        None,
        "The upper clip. With `cispo` it bounds the ratio itself, so `clip_high` is this bound minus 1.",
    ),
    used("delta", "`algorithm.loss.params.dual_clip`", None, "The largest ratio where the advantage is negative."),
    used("sapo_temperature_pos", "`algorithm.loss`", 1.0, "`tau_pos` of `sapo`."),
    used("sapo_temperature_neg", "`algorithm.loss`", 1.05, "`tau_neg` of `sapo`."),
    used("vespo_k_pos", "`algorithm.loss`", 2.0, "`k_pos` of `vespo`."),
    used("vespo_lambda_pos", "`algorithm.loss`", 3.0, "`lambda_pos` of `vespo`."),
    used("vespo_k_neg", "`algorithm.loss`", 3.0, "`k_neg` of `vespo`."),
    used("vespo_lambda_neg", "`algorithm.loss`", 2.0, "`lambda_neg` of `vespo`."),
    made(
        "beta",
        "`algorithm.kl.params.weight`, `algorithm.kl`",
        0.0,
        "0 becomes no KL; any other value is the weight of `k3` in the loss.",
        _kl,
    ),
    used("use_bias_correction_kl", "`algorithm.kl`", True, "`importance_weighted` of the KL."),
    same("entropy_coef", "algorithm.entropy_weight", 0.0),
    made(
        f"{VLLM}_correction",
        "`algorithm.correction`",
        True,
        "With `use_vllm`, the correction of `vllm_importance_sampling_mode`. Otherwise importance weights are "
        "truncated at 2, because episodes may be older than the policy that trains on them.",
        _correction,
    ),
    used(
        f"{VLLM}_mode",
        "`algorithm.correction`",
        "sequence_mask",
        "For example, `sequence_mask` becomes `mask` at the level `sequence`.",
    ),
    used(
        f"{VLLM}_clip_max", "`algorithm.correction`", 3.0, "`cap` of `truncate`, or `high` of `mask`; null: no bound."
    ),
    used(f"{VLLM}_clip_min", "`algorithm.correction`", None, "`floor` of `truncate`, or `low` of `mask`."),
    used(f"{VLLM}_cap", "`algorithm.correction`", None, "An older name of `vllm_importance_sampling_clip_max`."),
    used("off_policy_mask_threshold", "`algorithm.correction`", None, "Adds `opsm` with this `delta`."),
    none(
        "",
        "mask_truncated_completions",
        "Truncated episodes are trained, too. `algorithm.reward=[{name: overlong}]` lowers the rewards of long ones.",
    ),
    none(
        "",
        "top_entropy_quantile",
        "The losses `clip_cov` and `kl_cov` select tokens by the covariance of log-prob and advantage instead.",
    ),
    none(
        "",
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "`algorithm.entropy_weight` is a fixed weight.",
    ),
    none(
        "",
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "The reference of the KL stays the model of `model.path`, without the adapters of `model.lora.path`.",
    ),
)
