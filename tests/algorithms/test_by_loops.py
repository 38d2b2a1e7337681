"""Numbers a second time, by loops over tokens in plain Python that share nothing with the formulas under test."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.gpg import GpgAdvantage
from asyncrl.algorithms.advantages.optimal_token_baseline import OptimalTokenBaseline
from asyncrl.algorithms.advantages.pure import min_form
from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.corrections.reject import Reject
from asyncrl.algorithms.corrections.truncate import Truncate
from asyncrl.algorithms.log_ratios import at_level
from asyncrl.algorithms.losses.base import Updates
from asyncrl.algorithms.losses.dppo import DppoTv
from asyncrl.algorithms.losses.implicit import implicit_summary
from asyncrl.algorithms.losses.ipo import Ipo
from asyncrl.algorithms.policy_tokens import PolicyTokens
from tests.algorithms.support import alone, make_algorithm, make_rollouts, random_batch, rows, totals_of

SEEDS = st.integers(0, 10_000)
several = settings(max_examples=15, deadline=None)


def turns_of(tokens: Tokens) -> Iterator[list[list[int]]]:
    """Yield the turns of each sequence, each turn as the list of its tokens' indices."""
    mask, sequence = tokens.mask.tolist(), tokens.sequence.tolist()
    for row in sorted(set(sequence)):
        turns: list[list[int]] = []
        for place in (place for place, owner in enumerate(sequence) if owner == row):
            if mask[place] and (place == 0 or not mask[place - 1] or sequence[place - 1] != row):
                turns.append([])
            if mask[place]:
                turns[-1].append(place)
        yield turns


def members_of(episodes: Episodes) -> list[list[int]]:
    """The sequences of each group."""
    group = episodes.group.tolist()
    return [[row for row, each in enumerate(group) if each == index] for index in sorted(set(group))]


def updates_of(tokens: Tokens) -> Updates:
    """The policy moved by .2 on every second token and by -.4 on the others."""
    view = PolicyTokens.of(tokens)
    behaviour = view.take(tokens.behaviour)
    move = torch.where(torch.arange(len(behaviour)) % 2 == 0, 0.2, -0.4)
    advantages = view.take(tokens.values)
    return Updates(view, (behaviour + move).requires_grad_(), view.take(tokens.proximal), behaviour, advantages)


@given(SEEDS)
@several
def test_gpg_again(seed):
    episodes, _ = random_batch(seed)
    reward = [float(round(each)) if seed % 2 else each for each in episodes.reward.tolist()]
    episodes.reward.copy_(torch.tensor(reward, dtype=torch.float64))
    groups = members_of(episodes)
    useful = sum(len(mine) for mine in groups if len({reward[row] for row in mine}) > 1)
    expected = [0.0] * len(reward)
    for mine in groups:
        mean = math.fsum(reward[row] for row in mine) / len(mine)
        for row in mine:
            if useful and len({reward[each] for each in mine}) > 1:
                expected[row] = (reward[row] - mean) * len(reward) / useful
    assert GpgAdvantage().scores(episodes).tolist() == pytest.approx(expected, abs=1e-12)


@given(SEEDS, st.booleans(), st.booleans(), st.sampled_from([None, 1.1]))
@several
def test_the_optimal_token_baseline_again(seed, multi_turn, zero_tail, cap):
    episodes, tokens = random_batch(seed)
    places, energies = [], []
    for turns in turns_of(tokens):
        mine = [place for turn in turns for place in turn]
        places.append({place: t if multi_turn else place - mine[0] for t, place in enumerate(mine)})
        energies.append({})
        so_far = 0.0
        for place in mine:
            ratio = math.exp(tokens.proximal[place] - tokens.behaviour[place])
            weight = 1.0 if cap is None else min(ratio, cap) ** 2
            so_far += weight * (1 - 2 * math.exp(tokens.proximal[place]) + float(tokens.collisions[place]))
            energies[-1][places[-1][place]] = so_far
    group, expected = members_of(episodes), []
    for row, mine in enumerate(places):
        (members,) = (each for each in group if row in each)
        for t in mine.values():
            there = [each for each in members if t in energies[each]]
            baseline = math.fsum(float(episodes.reward[each]) * energies[each][t] for each in there)
            baseline /= math.fsum(energies[each][t] for each in there) + 1e-8
            alone = len(there) == 1 and (zero_tail or len(members) == 1)
            expected.append(float(episodes.reward[row]) - (0.0 if alone else baseline))
    part = OptimalTokenBaseline(multi_turn=multi_turn, zero_tail=zero_tail, cap=cap)
    assert part(make_rollouts(episodes, tokens)).advantages.tolist() == pytest.approx(expected)


@given(SEEDS)
@several
def test_the_strict_form_of_pure_again(seed):
    episodes, _ = random_batch(seed)
    episodes.step_scores.mul_(4).round_().div_(4)  # so that some are equal
    expected = []
    for row in range(episodes.count):
        scores = [
            score
            for owner, score in zip(episodes.step_sequence.tolist(), episodes.step_scores.tolist(), strict=True)
            if owner == row
        ]
        worst = min(scores)
        expected += [worst / scores.count(worst) if score == worst else 0.0 for score in scores]
    assert min_form(episodes, 0.0).tolist() == pytest.approx(expected)


@given(SEEDS)
@several
def test_the_levels_of_turns_and_a_truncation_with_a_floor_again(seed):
    _, tokens = random_batch(seed, drift=1.0)
    view = PolicyTokens.of(tokens)
    log_w = view.take(tokens.proximal) - view.take(tokens.behaviour)
    places = [place for turns in turns_of(tokens) for turn in turns for place in turn]
    by_place = dict(zip(places, log_w.tolist(), strict=True))
    means = [
        math.fsum(by_place[place] for place in turn) / len(turn)
        for turns in turns_of(tokens)
        for turn in turns
        for _ in turn
    ]
    assert at_level(log_w, view, "turn_geometric").tolist() == pytest.approx(means)
    rule = Truncate(level="turn_geometric", cap=1.2, floor=0.7)
    expected = [0.7 if w < 0.7 else 1.2 if w > 1.2 else w for w in map(math.exp, means)]
    assert rule.weigh(Ages(view, log_w, log_w)).tolist() == pytest.approx(expected)


@given(SEEDS, st.sampled_from(["token", "turn_mean", "sequence_sum", "sequence_mean", "sequence_max"]))
@several
def test_the_rejection_by_difference_again(seed, over):
    _, tokens = random_batch(seed)
    view = PolicyTokens.of(tokens)
    behaviour = view.take(tokens.behaviour)
    proximal = view.take(tokens.proximal)
    ages = Ages(view, proximal - behaviour, behaviour, behaviour=behaviour, proximal=proximal)
    expected = []
    for turns in turns_of(tokens):
        differences = [
            [math.exp(tokens.proximal[place]) - math.exp(tokens.behaviour[place]) for place in turn] for turn in turns
        ]
        together = [each for turn in differences for each in turn]
        judged = {
            "token": together,
            "turn_mean": [sum(turn) / len(turn) for turn in differences for _ in turn],
            "sequence_sum": [sum(together)] * len(together),
            "sequence_mean": [sum(together) / len(together)] * len(together),
            "sequence_max": [max(together)] * len(together),
        }[over]
        expected += [-0.1 <= each <= 0.15 for each in judged]
    assert Reject(by="difference", over=over, low=-0.1, high=0.15).keep(ages).tolist() == expected


@given(SEEDS)
@several
def test_dppo_with_two_regions_again(seed):
    _, tokens = random_batch(seed)
    updates = updates_of(tokens)
    expected = []
    for log_pi, log_prox, log_mu, advantage in zip(
        *(each.tolist() for each in (updates.logprobs, updates.proximal, updates.behaviour, updates.advantages)),
        strict=True,
    ):
        move = math.exp(log_pi) - math.exp(log_mu)
        dropped = move > 0.05 if advantage > 0 else move < -0.2
        expected.append(0.0 if dropped else -min(math.exp(log_pi - log_prox), 1.1) * advantage * log_pi)
    losses = DppoTv(delta=0.05, delta_low=0.2, cap=1.1)(updates).losses
    assert losses.tolist() == pytest.approx(expected)


@given(SEEDS)
@several
def test_ipo_and_its_gradient_again(seed):
    _, tokens = random_batch(seed)
    updates = updates_of(tokens)
    losses = Ipo(delta=0.1, cap=1.1, pull=0.3)(updates).losses
    losses.sum().backward()
    values, slopes = [], []
    for log_pi, log_mu, advantage in zip(
        *(each.tolist() for each in (updates.logprobs, updates.behaviour, updates.advantages)), strict=True
    ):
        kept = abs(math.exp(log_pi) - math.exp(log_mu)) <= 0.1
        first = -advantage * min(math.exp(log_pi - log_mu), 1.1) if kept else 0.0
        values.append(first + 0.3 * (log_pi - log_mu) ** 2)
        slopes.append(first + 0.6 * (log_pi - log_mu))
    assert losses.tolist() == pytest.approx(values)
    assert updates.logprobs.grad.tolist() == pytest.approx(slopes)


@given(SEEDS)
@several
def test_the_pairwise_accuracy_of_implicit_rewards_again_over_micro_batches(seed):
    episodes, tokens = random_batch(seed)
    algorithm = make_algorithm(advantage=("prime", {"beta": 0.3}), correction=[])
    sums = {}
    for members in ([0], range(1, episodes.count)):
        part = tokens.select(rows(tokens, members))
        _, found = algorithm.implicit_loss(part.implicit, episodes.outcome, part, totals_of(tokens))
        sums = {name: sums.get(name, 0) + value for name, value in found.items()}
    scores = [0.3 * math.fsum(float(tokens.implicit[p]) for turn in turns for p in turn) for turns in turns_of(tokens)]
    outcome, shares = episodes.outcome.tolist(), []
    for members in members_of(episodes):
        pairs = [(i, j) for i in members for j in members if outcome[i] > outcome[j]]
        right = sum((scores[i] > scores[j]) * (outcome[i] - outcome[j]) for i, j in pairs)
        shares.append(right / sum(outcome[i] - outcome[j] for i, j in pairs) if pairs else 0.5)
    found = algorithm.summary(sums, episodes)["implicit/pairwise_accuracy"]
    assert found == pytest.approx(sum(shares) / len(shares))
    assert "implicit/pairwise_accuracy" not in implicit_summary(sums)


@given(SEEDS)
@several
def test_the_prompt_mean_again_after_a_rejection(seed):
    episodes, tokens = random_batch(seed)
    algorithm = make_algorithm(loss="gpg", aggregation="prompt-mean", correction=[("mask", {"low": 0.8, "high": 1.2})])
    prepared = algorithm.prepare(episodes, tokens, alone)
    loss, _ = algorithm.loss(tokens.proximal, prepared, totals_of(tokens, episodes))
    turns, means = list(turns_of(tokens)), []
    for members in members_of(episodes):
        places = [place for row in members for turn in turns[row] for place in turn]
        total = 0.0
        for place in places:
            w = math.exp(tokens.proximal[place]) / math.exp(tokens.behaviour[place])
            if 0.8 <= w <= 1.2:
                total -= w * float(prepared.advantages[place]) * float(tokens.proximal[place])
        means.append(total / len(places))
    assert loss.item() == pytest.approx(sum(means) / len(means))


@given(SEEDS)
@several
def test_the_weight_streams_again(seed):
    episodes, tokens = random_batch(seed)
    streams = [("rl", {"score": "style"}), ("ce", {"weight": 0.2, "score": "outcome"}), ("ref_kl", {"delta": 0.1})]
    algorithm = make_algorithm(loss="gpg", correction=[("mask", {"low": 0.8, "high": 1.2})], stream=streams)
    prepared = algorithm.prepare(episodes, tokens, alone)
    now = tokens.proximal + 0.1
    policy, ce, ref_kl, weights, successes, count = 0.0, 0.0, 0.0, 0.0, 0, 0
    for row, turns in enumerate(turns_of(tokens)):
        for place in (place for turn in turns for place in turn):
            log_pi, log_mu = float(now[place]), float(tokens.behaviour[place])
            w, style = math.exp(log_pi - 0.1 - log_mu), float(episodes.extra["style"][row])
            weights, count = weights + style, count + 1
            if 0.8 <= w <= 1.2:
                policy -= style * w * float(prepared.advantages[place]) * log_pi
            if episodes.outcome[row] == 1:
                ce, successes = ce - 0.2 * log_pi, successes + 1
            if math.exp(log_pi) - math.exp(log_mu) >= -0.1:
                ref_kl -= (float(tokens.reference[place]) - log_pi) * math.exp(log_pi - log_mu)
    _, sums = algorithm.loss(now, prepared, totals_of(tokens))
    found = algorithm.summary(sums)
    assert found["loss/policy"] == pytest.approx(policy / weights)
    assert found["loss/ce"] == pytest.approx(ce / max(1, successes))
    assert found["loss/ref_kl"] == pytest.approx(ref_kl / count)


@given(SEEDS)
@several
def test_the_chi_square_of_sequences_again(seed):
    episodes, tokens = random_batch(seed)
    algorithm = make_algorithm(correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    _, sums = algorithm.loss(tokens.proximal, prepared, totals_of(tokens))
    squares = []
    for turns in turns_of(tokens):
        product = 1.0
        for place in (place for turn in turns for place in turn):
            product *= math.exp(tokens.proximal[place]) / math.exp(tokens.behaviour[place])
        squares.append(product**2)
    expected = sum(squares) / len(squares) - 1
    assert algorithm.summary(sums)["mismatch/chi_square_sequence"] == pytest.approx(expected)
