"""Tokens of which a grammar left little, with numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.batch import Totals
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, random_batch, totals_of

# Two answers of two tokens with rewards 1 and 0, whose advantages by rloo are 1 and -1. A grammar forced the second
# token of the first answer: its behaviour log-prob is 0, and without the grammar the policy gives it -5. Since then
# the policy has made the first token 1.1 times as likely, and nothing else.
BEHAVIOUR = [-1.0, 0.0, -1.0, -1.0]
PROXIMAL = [-1.0, -5.0, -1.0, -1.0]
POLICY = [-1.0 + log(1.1), -5.0, -1.0, -1.0]
GSPO = ("gspo", {"clip_low": 0.2, "clip_high": 0.2})
FORCED = [False, True, False, False]
MEANS: list[list[Any]] = [
    [("mask", {"level": "geometric", "low": 0.9, "high": 1.1})],
    [("mask", {"level": "turn_geometric", "low": 0.9, "high": 1.1})],
    [("truncate", {"level": "geometric", "cap": 9.0}), "normalise"],
    [("truncate", {"level": "turn_geometric", "cap": 9.0})],
    [("reject", {"over": "sequence_mean", "by": "k2", "high": 0.04})],
    [("reject", {"over": "turn_mean", "by": "k2", "high": 0.04})],
    [("opsm", {"delta": 0.14})],
    [("vaco", {"delta": 0.22})],
    [("m2po", {"tau": 0.07})],
]
"""Corrections that take a mean over tokens."""


def learn(restricted: bool, **parts: Any) -> tuple[float, list[float], dict[str, float], Tensor | None]:
    """Loss, gradient by the log-probs, metrics, and the weights that the correction gave."""
    algorithm = make_algorithm(advantage="rloo", **parts)
    tokens = make_tokens(
        [[1, 1], [1, 1]],
        behaviour=torch.tensor(BEHAVIOUR, dtype=torch.float64),
        proximal=torch.tensor(PROXIMAL, dtype=torch.float64),
        reference=torch.tensor(PROXIMAL, dtype=torch.float64) - 0.5,
        restricted=torch.tensor(FORCED) if restricted else None,
    )
    prepared = algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone)
    logprobs = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    loss, sums = algorithm.loss(logprobs, prepared, Totals(tokens=4, sequences=2, groups=1))
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), algorithm.summary(sums), prepared.weights


def test_ppo_with_truncated_weights_trains_the_other_tokens_as_if_the_forced_one_were_no_token_of_the_policys():
    # (-1.1 + 1 + 1) / 4: normalisers count all four tokens, as for any token that is dropped.
    loss, gradient, metrics, weights = learn(True, loss="ppo", correction=[("truncate", {"level": "token"})])
    assert loss == pytest.approx(0.9 / 4)
    assert gradient == pytest.approx([-1.1 / 4, 0.0, 1 / 4, 1 / 4])
    assert weights is not None
    assert weights.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert metrics["masked/grammar"] == metrics["masked/any"] == 1 / 4
    assert metrics["mismatch/kl"] == 0


def test_without_the_mark_the_ratio_of_the_forced_token_would_be_the_grammars_mass():
    _, _, metrics, weights = learn(False, loss="ppo", correction=[("truncate", {"level": "token"})])
    assert weights is not None
    assert weights.tolist() == pytest.approx([1.0, torch.tensor(-5.0).exp().item(), 1.0, 1.0])
    assert "masked/grammar" not in metrics


def test_the_ratio_of_a_sequence_leaves_the_forced_token_out():
    correction = [("mask", {"level": "sequence", "low": 0.5, "high": 2.0})]
    assert learn(True, loss="ppo", correction=correction)[1] == pytest.approx([-1.1 / 4, 0.0, 1 / 4, 1 / 4])
    # With it the first answer is out of bounds, though its policy has hardly moved.
    assert learn(False, loss="ppo", correction=correction)[1] == pytest.approx([0.0, 0.0, 1 / 4, 1 / 4])


def test_gspo_takes_the_mean_log_ratio_of_the_tokens_that_are_trained():
    # The ratio of the first answer is 1.1, not its square root, and the gradient of its one token all of it.
    loss, gradient, *_ = learn(True, loss=GSPO, correction=[], aggregation="seq-mean-token-sum")
    assert gradient[:2] == pytest.approx([-1.1 / 2, 0.0])
    assert loss == pytest.approx((-1.1 + 2) / 2)


def test_a_forced_token_is_not_charged_for_the_reference():
    parts = {"loss": "ppo", "correction": [], "kl": ("k1", {"weight": 1.0})}
    # k1 is log pi - log pi_ref: 0.5 + log 1.1, then 0.5 for both tokens of the second answer.
    assert learn(True, **parts)[0] - learn(True, loss="ppo", correction=[])[0] == pytest.approx((1.5 + log(1.1)) / 4)


def test_where_the_training_pass_gives_the_proximal_policy_the_forced_token_is_left_out_too():
    tokens = make_tokens(
        [[1, 1], [1, 1]],
        behaviour=torch.tensor(BEHAVIOUR, dtype=torch.float64),
        proximal=None,
        restricted=torch.tensor(FORCED),
    )
    algorithm = make_algorithm(advantage="rloo", loss="ppo", correction=[("truncate", {})], proximal="auto")
    prepared = algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone)
    logprobs = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, prepared, Totals(tokens=4, sequences=2, groups=1))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.1 / 4, 0.0, 1 / 4, 1 / 4])


def test_the_tokens_that_a_loss_singles_out_are_chosen_among_those_that_are_trained() -> None:
    # Half of the tokens are singled out: of three that are trained, and not of four.
    algorithm = make_algorithm(advantage="rloo", loss=("kl_cov", {"share": 0.5}), correction=[])
    behaviour = torch.tensor([-1.0, -9.0, -1.5, -2.0], dtype=torch.float64)
    tokens = make_tokens(
        [[1, 1], [1, 1]], behaviour=behaviour, proximal=behaviour, restricted=torch.tensor([False, True, False, False])
    )
    selected = algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone).selected
    assert selected is not None
    assert selected.tolist() == [True, False, False, False]


def test_a_rule_that_drops_other_tokens_leaves_the_forced_one_dropped() -> None:
    # The rule drops the second answer's first token alone, whose ratio is 1/2.
    proximal = [-1.0, -5.0, -1.0 - log(2), -1.0]
    tokens = make_tokens(
        [[1, 1], [1, 1]],
        behaviour=torch.tensor(BEHAVIOUR, dtype=torch.float64),
        proximal=torch.tensor(proximal, dtype=torch.float64),
        restricted=torch.tensor(FORCED),
    )
    algorithm = make_algorithm(
        advantage="rloo", loss="gpg", correction=[("mask", {"low": 0.9, "high": 2.0})], entropy_weight=1.0
    )
    prepared = algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone)
    logprobs = torch.tensor(proximal, dtype=torch.float64, requires_grad=True)
    entropy = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss, sums = algorithm.loss(logprobs, prepared, Totals(tokens=4, sequences=2, groups=1), entropy)
    loss.backward()
    assert logprobs.grad is not None
    assert entropy.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 4, 0.0, 0.0, 1 / 4])
    assert entropy.grad.tolist() == pytest.approx([-1 / 4, 0.0, 0.0, -1 / 4])
    assert algorithm.summary(sums)["masked/any"] == 2 / 4


def test_a_stream_that_trains_every_policy_token_leaves_the_forced_one_out() -> None:
    # The cross-entropy is a mean over all four tokens, and the forced one has no gradient.
    _, gradient, *_ = learn(True, loss="gpg", correction=[], stream=[("rl", {"weight": 0}), "ce"])
    assert gradient == pytest.approx([-1 / 4, 0.0, -1 / 4, -1 / 4])


def test_the_weights_that_are_kept_of_an_answer_leave_its_forced_token_out() -> None:
    # The training pass gives the proximal policy. The ratio of the first answer is 1.1, and with the token 1.1 e^-5.
    tokens = make_tokens(
        [[1, 1], [1, 1]],
        behaviour=torch.tensor(BEHAVIOUR, dtype=torch.float64),
        proximal=None,
        restricted=torch.tensor(FORCED),
    )
    correction = [("truncate", {"level": "sequence", "cap": 2.0})]
    algorithm = make_algorithm(advantage="rloo", loss="ppo", correction=correction, proximal="auto")
    prepared = algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone)
    proximal, weights = algorithm.importance(torch.tensor(POLICY, dtype=torch.float64), prepared)
    assert weights.tolist() == pytest.approx([1.1, 0.0, 1.0, 1.0])
    assert proximal.tolist() == pytest.approx([-1.0 + log(1.1), 0.0, -1.0, -1.0])


@pytest.mark.parametrize("correction", MEANS, ids=str)
def test_a_mean_over_tokens_is_that_of_a_batch_in_which_forced_tokens_are_context(correction: list[Any]) -> None:
    algorithm = make_algorithm(advantage="grpo", correction=correction)
    for seed in (1, 3, 5):
        episodes, tokens = random_batch(seed)
        # A grammar forces the first token of every turn, and the whole first sequence.
        begins = tokens.mask & ~tokens.mask.roll(1)
        forced = tokens.mask & (begins | (tokens.sequence == 0))
        assert tokens.proximal is not None
        policy = tokens.proximal - 0.2
        found = []
        for batch in (replace(tokens, restricted=forced), replace(tokens, mask=tokens.mask & ~forced)):
            prepared = algorithm.prepare(episodes, batch, alone)
            _, sums = algorithm.loss(policy, prepared, totals_of(tokens, episodes))
            metrics = algorithm.summary(sums)
            mismatch = {name: each for name, each in metrics.items() if name.startswith(("mismatch/", "ratio_bin/"))}
            dropped = {name: sums[f"masked/{name}"] for name in algorithm.parts.rule_names if f"masked/{name}" in sums}
            found.append((algorithm.importance(policy, prepared)[1], dropped, mismatch))
        torch.testing.assert_close(*found)


def test_an_adaptive_coefficient_follows_the_kl_of_the_tokens_that_are_trained() -> None:
    # k1 is 0.5 on every token but the forced one. So the target is met, and the coefficient stays.
    algorithm = make_algorithm(
        advantage="rloo", loss="ppo", correction=[], kl=("k1", {"weight": 1.0, "target": 0.5, "horizon": 10})
    )
    proximal = torch.tensor(PROXIMAL, dtype=torch.float64)
    tokens = make_tokens(
        [[1, 1], [1, 1]],
        behaviour=torch.tensor(BEHAVIOUR, dtype=torch.float64),
        proximal=proximal,
        reference=proximal - 0.5,
        restricted=torch.tensor(FORCED),
    )
    for _ in range(2):
        algorithm.prepare(make_episodes([1.0, 0.0], [0, 0]), tokens, alone)
    assert algorithm.kl_weight == 1.0
