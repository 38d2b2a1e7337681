"""Demonstrations as members of groups, with numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import pytest
import torch

from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.algorithms.from_config import check
from asyncrl.algorithms.metrics import episode_metrics
from asyncrl.config.schema import DemonstrationConfig
from asyncrl.errors import ConfigError
from tests.algorithms.support import alone, make_algorithm, make_config, make_episodes, make_tokens

# Two answers of two tokens that the policy played, with rewards 0 and 1, and a demonstration of three with reward 2:
# their mean is 1 and their standard deviation 1, so the advantages are -1, 0 and 1.
MASKS = [[0, 1, 1], [0, 1, 1], [0, 1, 1, 1]]
SHOWN = [False] * 7 + [True] * 3
SAMPLED_LOG, SHOWN_LOG = [-1.0, -1.0, -2.0, -2.0], [log(0.5), log(0.1), log(0.01)]
TOTALS = Totals(tokens=7, sequences=3, groups=1, group_tokens=torch.tensor([7, 7, 7]))


def _group(rewards: tuple[float, ...] = (0.0, 1.0, 2.0), **changes: Any) -> tuple[Episodes, Tokens]:
    episodes = make_episodes(
        rewards,
        [0, 0, 0],
        lengths=torch.tensor([2, 2, 3]),
        demonstrated=torch.tensor([False, False, True]),
        version=5,
    )
    mask = torch.tensor([flag for each in MASKS for flag in each]).bool()
    shown = torch.tensor(SHOWN)
    sampled = torch.zeros(10, dtype=torch.float64)
    sampled[mask & ~shown] = torch.tensor(SAMPLED_LOG, dtype=torch.float64)
    tokens = make_tokens(
        MASKS,
        behaviour=sampled,
        proximal=_logprobs().detach(),
        versions=torch.where(shown, -2, torch.where(mask, 4, -1)),
        demonstrated=shown,
        **changes,
    )
    return episodes, tokens


def _logprobs() -> torch.Tensor:
    values = [0.0, *SAMPLED_LOG[:2], 0.0, *SAMPLED_LOG[2:], 0.0, *SHOWN_LOG]
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def _learn(
    weight: str = "none", tokens: Tokens | None = None, **parts: Any
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient by the log-probs of the seven tokens, and metrics."""
    algorithm = make_algorithm(
        advantage=("grpo", {}), demonstration=DemonstrationConfig(weight=weight, gamma=0.1), **parts
    )
    episodes, made = _group()
    prepared = algorithm.prepare(episodes, made if tokens is None else tokens, alone)
    logprobs = _logprobs()
    loss, sums = algorithm.loss(logprobs, prepared, TOTALS)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[prepared.mask].tolist(), algorithm.summary(sums)


def test_the_demonstrations_reward_is_in_the_baseline_and_its_tokens_get_its_advantage():
    episodes, tokens = _group()
    advantages = make_algorithm(advantage="grpo").prepare(episodes, tokens, alone).advantages
    assert advantages is not None
    assert advantages[tokens.mask].tolist() == pytest.approx([-1, -1, 0, 0, 1, 1, 1], abs=1e-5)


def test_without_a_weight_each_of_its_tokens_has_the_gradient_of_its_advantage():
    loss, gradient, metrics = _learn(loss="ppo", correction=[])
    assert gradient == pytest.approx([1 / 7, 1 / 7, 0, 0, -1 / 7, -1 / 7, -1 / 7], abs=1e-5)
    assert loss == pytest.approx((2 - 3) / 7, abs=1e-5)
    assert metrics["loss/policy"] + metrics["loss/demonstration"] == pytest.approx(loss)


def test_the_shaped_weight_is_p_over_p_plus_gamma_and_teaches_most_near_gamma():
    loss, gradient, _ = _learn("shaped", loss="ppo", correction=[])
    shaped = [exp(each) / (exp(each) + 0.1) for each in SHOWN_LOG]
    # The derivative of p / (p + gamma) by log p is p gamma / (p + gamma)^2: 0.139, 0.25 and 0.083 here.
    slopes = [p * 0.1 / (p + 0.1) ** 2 for p in map(exp, SHOWN_LOG)]
    assert gradient[4:] == pytest.approx([-slope / 7 for slope in slopes], abs=1e-5)
    assert loss == pytest.approx((2 - sum(shaped)) / 7, abs=1e-5)


def test_a_token_that_the_policy_holds_for_impossible_has_a_finite_gradient():
    algorithm = make_algorithm(advantage="grpo", demonstration=DemonstrationConfig(weight="shaped"))
    episodes, tokens = _group()
    prepared = algorithm.prepare(episodes, tokens, alone)
    logprobs = torch.where(tokens.mask, -1e4, 0.0).requires_grad_()
    loss, _ = algorithm.loss(logprobs, prepared, TOTALS)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("aggregation", "sampled", "shown"),
    [
        ("token-mean", 1 / 7, 1 / 7),
        ("token-sum", 1, 1),
        ("seq-mean-token-mean", 1 / 3 / 2, 1 / 3 / 3),
        ("seq-mean-token-sum", 1 / 3, 1 / 3),
        ("prompt-mean", 1 / 7, 1 / 7),
        (("seq-mean-token-sum-norm", {"norm": 10.0}), 1 / 30, 1 / 30),
    ],
)
def test_each_aggregation_counts_its_tokens_as_it_counts_those_of_other_members(
    aggregation: Any, sampled: float, shown: float
):
    _, gradient, _ = _learn(loss="ppo", correction=[], aggregation=aggregation)
    assert gradient == pytest.approx([sampled, sampled, 0, 0, -shown, -shown, -shown], abs=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce", "dro", "vespo", "oapl"])
@pytest.mark.parametrize(
    "correction",
    [
        [],
        [("truncate", {"level": "sequence"}), "normalise"],
        [("mask", {"level": "geometric"}), "zero_variance"],
        ["m2po"],
        [("reject", {"over": "sequence_mean", "high": 2.0})],
    ],
)
def test_no_loss_and_no_correction_changes_what_a_demonstration_teaches(loss: str, correction: Any):
    try:
        algorithm = make_algorithm(advantage="grpo", loss=loss, correction=correction)
    except ConfigError:
        pytest.skip("these do not go together")
    episodes, tokens = _group()
    prepared = algorithm.prepare(episodes, tokens, alone)
    logprobs = _logprobs()
    algorithm.loss(logprobs, prepared, TOTALS)[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad[tokens.demonstrated].tolist() == pytest.approx([-1 / 7] * 3, abs=1e-5)


@pytest.mark.parametrize("parts", [{}, {"correction": ["m2po"]}, {"kl": ("k3", {"weight": 0.1})}, {"loss": "kl_cov"}])
def test_ratios_ages_and_kl_are_measured_as_if_it_were_not_there(parts: dict[str, Any]):
    reference = torch.full((10,), -1.5, dtype=torch.float64)
    episodes, tokens = _group(reference=reference)
    algorithm = make_algorithm(**{"advantage": "grpo", "correction": [], **parts})
    prepared = algorithm.prepare(episodes, tokens, alone)
    with_it = algorithm.summary(algorithm.loss(_logprobs(), prepared, TOTALS)[1])
    assert prepared.demonstrated is not None
    unmasked = replace(prepared, mask=prepared.mask & ~prepared.demonstrated, demonstrated=None)
    without = algorithm.summary(algorithm.loss(_logprobs(), unmasked, replace(TOTALS, tokens=4))[1])
    apart = {name for name in with_it if name.startswith("demonstration/") or name == "loss/demonstration"}
    # Terms of the loss are divided by the tokens of all members.
    measured = {name: value for name, value in with_it.items() if name not in apart and not name.startswith("loss/")}
    assert measured == pytest.approx({name: value for name, value in without.items() if name in measured})
    assert {"mismatch/k3", "update/k3", "token_lag/mean", "token_lag/1"} <= set(measured)
    assert with_it["token_lag/mean"] == 1
    assert with_it["demonstration/tokens"] == 3
    assert with_it["demonstration/nll"] == pytest.approx(-sum(SHOWN_LOG) / 3)
    assert with_it["demonstration/probability"] == pytest.approx(0.61 / 3)


def test_a_kl_in_the_reward_charges_the_sampled_members_only():
    episodes, tokens = _group(reference=torch.full((10,), -1.5, dtype=torch.float64))
    algorithm = make_algorithm(
        advantage=("grpo", {"normalise_std": False}), kl=("k1", {"weight": 1.0, "place": "reward"}), correction=[]
    )
    prepared = algorithm.prepare(episodes, tokens, alone)
    # k1 is 0.5 for each token of the first answer, and -0.5 for those of the second: rewards are -1, 2 and 2.
    assert prepared.advantages is not None
    assert prepared.advantages[tokens.mask].tolist() == pytest.approx([-2, -2, 1, 1, 1, 1, 1])


def test_the_weights_that_are_kept_of_its_tokens_are_those_of_their_gradient():
    episodes, tokens = _group()
    algorithm = make_algorithm(advantage="grpo", correction=[], demonstration=DemonstrationConfig(weight="shaped"))
    proximal, weights = algorithm.importance(_logprobs().detach(), algorithm.prepare(episodes, tokens, alone))
    assert weights[tokens.mask].tolist() == pytest.approx([1] * 4 + [0.05 / 0.36, 0.25, 0.001 / 0.0121])
    assert proximal[tokens.mask].tolist() == pytest.approx([*SAMPLED_LOG, *SHOWN_LOG])


def test_what_is_told_of_rewards_and_lengths_is_of_the_members_that_were_played():
    episodes, _ = _group()
    told = episode_metrics(episodes)
    assert (told["reward/mean"], told["reward/max"], told["length/max"]) == (0.5, 1, 2)
    assert (told["demonstration/episodes"], told["demonstration/reward"]) == (1, 2)
    assert make_algorithm().summary({}, episodes)["groups/zero_variance"] == 0


def test_a_pass_of_demonstrations_alone_has_their_gradient():
    algorithm = make_algorithm(advantage="grpo", loss="ppo")
    episodes, tokens = _group()
    prepared = algorithm.prepare(episodes, tokens, alone)
    only = prepared.select(torch.arange(6, 10))
    logprobs = _logprobs().detach()[6:].requires_grad_()
    loss, _ = algorithm.loss(logprobs, only, TOTALS)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -1 / 7, -1 / 7, -1 / 7], abs=1e-5)


def test_the_reward_of_a_group_with_one_played_member_is_compared_with_its_demonstration():
    episodes = make_episodes([0.0, 1.0], [0, 0], demonstrated=torch.tensor([False, True]))
    scores = episodes.groups.normalise(episodes.reward, by_std=True)
    assert scores.tolist() == pytest.approx([-sqrt(0.5), sqrt(0.5)], abs=1e-5)


@pytest.mark.parametrize("advantage", ["gae", "vtrace", "optimal_token_baseline"])
def test_advantages_of_sampled_tokens_are_refused_with_the_two_ways_out(advantage: str):
    config = make_config(advantage=advantage, correction=[])
    check(config, step_scores=True, group_size=4)
    with pytest.raises(ConfigError, match=r"data\.demonstration=null, or algorithm\.advantage"):
        check(config, step_scores=True, group_size=4, demonstrations=True)


def test_each_member_is_charged_for_its_own_tokens_where_a_demonstration_comes_before_it():
    episodes, tokens = _group(reference=torch.full((10,), -1.5, dtype=torch.float64))
    tokens = tokens.select(torch.tensor([6, 7, 8, 9, 0, 1, 2, 3, 4, 5]))
    algorithm = make_algorithm(
        advantage=("grpo", {"normalise_std": False}), kl=("k1", {"weight": 1.0, "place": "reward"}), correction=[]
    )
    prepared = algorithm.prepare(episodes, tokens, alone)
    # As where it comes last: rewards 0 - 1, 1 + 1 and 2.
    assert prepared.advantages is not None
    assert prepared.advantages[tokens.mask].tolist() == pytest.approx([1, 1, 1, -2, -2, 1, 1])
