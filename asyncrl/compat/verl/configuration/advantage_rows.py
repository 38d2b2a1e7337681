"""Translates the keys of verl's section `algorithm` that set the advantage."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.compat.rows import Setting, made, part, used
from asyncrl.compat.verl.configuration.actor_rows import ESTIMATOR
from asyncrl.compat.verl.configuration.correction_rows import CORRECTION, bounds, score_name
from asyncrl.compat.verl.configuration.loss_rows import aggregated
from asyncrl.compat.verl.configuration.source import VerlConfig

NAMED = "algorithm.gdpo_reward"
PLAIN = {
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "remax": "remax",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


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
            capped = {"cap": bounds(source[f"{CORRECTION}.rollout_is_threshold"])[1]} if _weighs_tokens(source) else {}
            yield "algorithm.advantage", part("optimal_token_baseline", gamma=gamma, multi_turn=turns, **capped)
        case "gdpo":
            yield from _named_rewards(source)
        case _ if name in PLAIN:
            yield "algorithm.advantage", part(PLAIN[name])
        case _:
            # A run refuses this name. A default in its place would train with another algorithm.
            yield "algorithm.advantage", part(name)
            yield (
                f"{ESTIMATOR}={name}: asyncrl has no advantage of this name (docs/algorithms.md lists all; one of your "
                "own is named by its path, as module.Class)"
            )
    if name == "remax":
        yield "algorithm.greedy_sibling", True
    if name == "gae":
        yield "algorithm.value_aggregation", aggregated(source)


def _named_rewards(source: VerlConfig) -> Iterator[Setting | str]:
    keys, weights = source[f"{NAMED}_keys"], source[f"{NAMED}_weights"]
    if not keys or len(weights or keys) != len(keys):
        yield "algorithm.advantage", part("gdpo", weights={"outcome": 1.0})
        yield f"{NAMED}_keys={keys} and _weights={weights}: set {{SCORE: WEIGHT}} in algorithm.advantage.params.weights"
        return
    names = [score_name(source, key) for key in keys]
    yield "algorithm.advantage", part("gdpo", weights=dict(zip(names, weights or [1.0] * len(keys), strict=True)))


def _weighs_tokens(source: VerlConfig) -> bool:
    """True if verl computes a weight of each token before the update."""
    return source[f"{CORRECTION}.rollout_is"] == "token" and not source[f"{CORRECTION}.bypass_mode"]


ROWS = (
    made(
        ESTIMATOR,
        "`algorithm.advantage`",
        "gae",
        "The advantage of the same method. `gae` trains a critic and whitens advantages; `remax` also sets "
        "`algorithm.greedy_sibling`. The name of an estimator that asyncrl lacks is kept, so that a run refuses it.",
        _advantage,
    ),
    used(
        f"{NAMED}_keys",
        "`algorithm.advantage`",
        None,
        "The names in `weights` of `gdpo`: the key `format` becomes, for example, `rule/compute_score/format`, or with "
        "a manager `manager/format`. An episode without one of these scores becomes a dead letter; verl stops with an "
        "error.",
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
    used(
        "algorithm.norm_adv_by_std_in_grpo",
        "`algorithm.advantage`",
        True,
        "`normalise_std` of `grpo` and `grpo_passk`.",
    ),
)
