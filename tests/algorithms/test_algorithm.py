"""The promises that every composition keeps, no matter which parts it has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.errors import InvariantError
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_episodes,
    make_tokens,
    on_ranks,
    random_batch,
    rows,
    totals_of,
)

OWN = "tests.algorithms.my_parts"
TRUNCATE = ("truncate", {"level": "token", "cap": 1.3})
COMPOSITIONS = {
    "grpo": {"correction": [TRUNCATE]},
    "ppo": {
        "advantage": ("gae", {"whiten": True, "step_weight": 0.3}),
        "loss": ("ppo", {"clip_high": 0.28, "dual_clip": 1.5}),
        "correction": [("mask", {"low": 0.7, "high": 1.4}), "normalise", ("veto", {"threshold": 0.5}), ("opsm", {})],
        "kl": ("k3+", {"weight": 0.1}),
        "entropy_weight": 0.01,
        "aggregation": "seq-mean-token-mean",
    },
    "gspo": {
        "loss": ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
        "correction": [("truncate", {"level": "geometric"}), ("reject", {"by": "k2", "high": 0.05}), "opsm"],
        "aggregation": "seq-mean-token-mean",
    },
    "gmpo": {"advantage": "rloo", "loss": "gmpo", "correction": [("mask", {"level": "sequence"}), "normalise"]},
    "clip_cov": {
        "advantage": ("pure", {"outcome_weight": 1.0}),
        "loss": ("clip_cov", {"share": 0.2, "cov_low": -0.1, "cov_high": 0.1}),
        "correction": [("truncate", {"level": "turn"}), ("m2po", {"tau": 0.05})],
        "aggregation": ("seq-mean-token-sum-norm", {"norm": 7}),
    },
    "kl_cov": {
        "advantage": "prime",
        "loss": ("kl_cov", {"share": 0.2}),
        "correction": ["zero_variance"],
        "kl": "abs",
        "aggregation": "token-sum",
    },
    "impala": {"advantage": "vtrace", "loss": "gpg", "correction": [], "kl": ("k1", {"place": "reward"})},
    "stable_reinforce": {
        "advantage": "reinforce_pp",
        "loss": ("stable_reinforce", {"bound": 1.2}),
        "correction": [TRUNCATE, ("outliers", {"sigmas": 1.5})],
    },
    "tis": {
        "advantage": "reinforce_pp_baseline",
        "loss": "reinforce",
        "correction": [],
        "proximal": "behaviour",
        "reward": [("overlong", {"max_length": 8, "buffer": 4})],
        "aggregation": "seq-mean-token-sum",
    },
    "dppo": {"advantage": "process_grpo", "loss": "dppo_tv", "correction": [TRUNCATE], "proximal": "interpolate"},
    "ipo": {
        "advantage": "gae",
        "aggregation": "prompt-mean",
        "loss": ("ipo", {"delta": 0.2, "pull": 0.1}),
        "correction": [("reject", {"by": "difference", "over": "turn_mean", "low": -0.2, "high": 0.2})],
    },
    "sapo": {
        "advantage": "grpo_turns",
        "loss": "sapo",
        "correction": [("mask", {}), "opsm"],
        "proximal": "interpolate",
    },
    "kpop": {"correction": [("kpop", {"phi": 0.02}), "opsm"], "advantage": "rloo", "lr_scale": "ess"},
    "sat": {"loss": ("sat", {"quantile": 0.6}), "correction": ["zero_variance"]},
    "sat_gspo": {"loss": ("sat_gspo", {"quantile": 0.6, "clip_low": 0.1}), "correction": ["veto"], "kl": "k3"},
    "remax": {"advantage": "remax", "loss": "cispo", "correction": [TRUNCATE], "greedy_sibling": True},
    "own": {
        "advantage": f"{OWN}.Centred",
        "loss": f"{OWN}.Squared",
        "correction": [f"{OWN}.Near"],
        "kl": f"{OWN}.Quartic",
        "aggregation": f"{OWN}.HalfMean",
        "reward": [f"{OWN}.Short"],
        "lr_scale": f"{OWN}.Cautious",
    },
    "otb": {
        "advantage": ("optimal_token_baseline", {"cap": 1.3, "gamma": 0.9, "step_weight": 0.5}),
        "kl": ("k1", {"place": "reward"}),
    },
    "streams": {
        "correction": [("mask", {"low": 0.8, "high": 1.2})],
        "stream": [("rl", {"score": "style"}), ("ce", {"weight": 0.2, "score": "outcome"}), ("ref_kl", {"delta": 0.1})],
        "aggregation": "seq-mean-token-mean",
    },
    "own stream": {"stream": [("rl", {"weight": 0.0}), f"{OWN}.Focal"], "correction": [], "loss": "gpg"},
    "otb by position": {"advantage": ("optimal_token_baseline", {"multi_turn": False, "zero_tail": False})},
    "dro": {"advantage": "reinforce_pp", "loss": "dro", "kl": ("k2", {"target": 0.01})},
    "vespo": {"loss": "vespo", "correction": ["zero_variance"]},
    "topr": {"loss": ("topr", {"level": "geometric"}), "correction": [], "aggregation": "seq-mean-token-mean"},
    "oapl": {
        "advantage": ("oapl", {"beta": 0.5}),
        "loss": ("oapl", {"beta": 0.5}),
        "correction": [],
        "aggregation": "seq-mean-token-mean",
    },
    "luspo": {
        "loss": ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
        "correction": [("truncate", {"level": "geometric"})],
        "aggregation": "seq-mean-token-sum",
    },
    "vaco": {"advantage": "gae", "correction": [TRUNCATE, ("vaco", {"delta": 0.2})]},
}
SEEDS = st.integers(0, 10_000)
each_composition = pytest.mark.parametrize("composition", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())


def trained(seed: int, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probs and entropies float[N] of the policy after an update."""
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(tokens.mask.numel(), generator=generator, dtype=torch.float64).to(tokens.behaviour.dtype)
    return tokens.behaviour + 0.2 * noise, noise.abs()


def for_config(tokens: Tokens, algorithm: Algorithm) -> Tokens:
    return tokens if algorithm.needs_proximal else replace(tokens, proximal=None)


def learn(algorithm, tokens, logprobs, entropy, totals, split):
    """The loss, the gradients by log-prob and entropy, and the sums, over the micro-batches of `split`."""
    logprobs, entropy = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    total, sums = 0.0, {}
    for members in split:
        place = rows(tokens, members)
        loss, found = algorithm.loss(logprobs[place], tokens.select(place), totals, entropy[place])
        loss.backward()
        total += loss.item()
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + value
    zero = torch.zeros_like(logprobs)
    return total, [zero if each.grad is None else each.grad for each in (logprobs, entropy)], sums


def restricted(tokens: Tokens, seed: int) -> Tokens:
    """The tokens, about a third of which a grammar restricted."""
    chance = torch.rand(len(tokens.mask), generator=torch.Generator().manual_seed(seed))
    return replace(tokens, restricted=tokens.mask & (chance < 1 / 3))


def whole(algorithm: Algorithm, episodes: Episodes, tokens: Tokens, logprobs, entropy):
    tokens = algorithm.prepare(episodes, for_config(tokens, algorithm), alone)
    return learn(algorithm, tokens, logprobs, entropy, totals_of(tokens, episodes), [range(episodes.count)])


def close(one, other, tolerance: float) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@each_composition
@given(seed=SEEDS, ranks=st.integers(1, 3), data=st.data())
@settings(max_examples=6, deadline=None)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_ranks_and_micro_batches_change_neither_loss_nor_gradient_nor_metrics(
    composition, dtype, tolerance, seed, ranks, data
):
    episodes, tokens = random_batch(seed, dtype)
    tokens = restricted(tokens, seed) if data.draw(st.booleans()) else tokens
    logprobs, entropy = trained(seed, tokens)
    algorithm = make_algorithm(**composition)
    expected = whole(algorithm, episodes, tokens, logprobs, entropy)
    order = data.draw(st.permutations(range(episodes.count)))
    owner = {member: data.draw(st.integers(0, ranks - 1)) for member in order}
    micro = {member: data.draw(st.integers(0, 2)) for member in order}
    totals = totals_of(tokens, episodes)

    def work(rank, reduce):
        mine = make_algorithm(**composition)
        share = (
            rows(tokens, [m for m in order if owner[m] == rank]) if rank in owner.values() else torch.empty(0).long()
        )
        prepared = mine.prepare(episodes, for_config(tokens.select(share), mine), reduce)
        split = [[m for m in order if owner[m] == rank and micro[m] == part] for part in range(3)]
        return share, mine, learn(mine, prepared, logprobs[share], entropy[share], totals, [s for s in split if s])

    results = on_ranks(ranks, work)
    # Terms of either sign may cancel to far less than their rounding: a sum is as exact as its terms are many.
    terms = totals.tokens if composition.get("aggregation") == "token-sum" else 1
    if composition.get("loss") == "dro":
        terms *= 10  # its terms are squares, which reach that size
    close(sum(loss for _, _, (loss, _, _) in results), expected[0], tolerance * max(terms, abs(expected[0])))
    for kind in range(2):
        gradient = torch.zeros_like(logprobs)
        for share, _, (_, gradients, _) in results:
            gradient[share] = gradients[kind]
        close(gradient, expected[1][kind], tolerance)
    sums = {}
    for _, _, (_, _, found) in results:
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + value
    ours, theirs = results[0][1].summary(sums), algorithm.summary(expected[2])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # The root of a variance that is only rounding is far larger than the rounding.
        rounding = math.sqrt(tolerance) if name.endswith("/std") else 10 * tolerance
        assert ours[name] == pytest.approx(value, rel=100 * tolerance, abs=rounding), name


@pytest.mark.slow
@each_composition
@given(seed=SEEDS, junk=st.sampled_from([torch.nan, torch.inf, -torch.inf, 89.0]))
@settings(max_examples=6, deadline=None)
def test_masked_tokens_contribute_exactly_nothing(composition, seed, junk):
    episodes, tokens = random_batch(seed)
    logprobs, entropy = trained(seed, tokens)
    expected = whole(make_algorithm(**composition), episodes, tokens, logprobs, entropy)
    fields = ("behaviour", "proximal", "reference", "values", "implicit", "collisions")
    spoilt = replace(tokens, **{name: getattr(tokens, name).where(tokens.mask, junk) for name in fields})
    found = whole(
        make_algorithm(**composition),
        episodes,
        spoilt,
        logprobs.where(tokens.mask, junk),
        entropy.where(tokens.mask, junk),
    )
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)
        assert ours[~tokens.mask].count_nonzero() == 0


@pytest.mark.slow
@each_composition
@given(seed=SEEDS, junk=st.sampled_from([torch.nan, torch.inf, -torch.inf, 89.0]))
@settings(max_examples=6, deadline=None)
def test_tokens_that_a_grammar_restricted_contribute_exactly_nothing_whatever_the_learner_thinks_of_them(
    composition, seed, junk
):
    episodes, tokens = random_batch(seed)
    tokens = restricted(tokens, seed)
    logprobs, entropy = trained(seed, tokens)
    expected = whole(make_algorithm(**composition), episodes, tokens, logprobs, entropy)
    free = ~tokens.restricted
    spoilt = replace(tokens, **{name: getattr(tokens, name).where(free, junk) for name in ("proximal", "reference")})
    spoilt = replace(spoilt, collisions=tokens.collisions.where(free, 0.9))
    policy = logprobs.where(free, junk), entropy.where(free, junk)
    found = whole(make_algorithm(**composition), episodes, spoilt, *policy)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)
        assert ours[~free].count_nonzero() == 0


@pytest.mark.parametrize("name", ["grpo", "gmpo", "clip_cov", "kl_cov", "remax", "dro", "vespo", "topr", "oapl"])
@given(seed=SEEDS, junk=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
@settings(max_examples=5, deadline=None)
def test_rejected_tokens_contribute_exactly_nothing_even_where_the_policy_is_not_finite(name, seed, junk):
    episodes, tokens = random_batch(seed)
    logprobs, entropy = trained(seed, tokens)
    corrections = COMPOSITIONS[name].get("correction", [])
    algorithm = make_algorithm(**{**COMPOSITIONS[name], "correction": [*corrections, "veto"]})
    far = tokens.proximal.where(tokens.sequence != 0, tokens.behaviour - 15)
    prepared = algorithm.prepare(episodes, replace(tokens, proximal=far), alone)
    dropped = prepared.rejected != 0
    assert dropped[tokens.mask & (tokens.sequence == 0)].all()
    loss, gradients, _ = learn(
        algorithm,
        prepared,
        logprobs.where(~dropped, junk),
        entropy.where(~dropped, junk),
        totals_of(tokens),
        [range(episodes.count)],
    )
    assert loss == loss
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert gradient[dropped].count_nonzero() == 0


def test_a_batch_in_which_everything_is_rejected_is_a_counted_no_op():
    episodes, tokens = random_batch(2)
    algorithm = make_algorithm(correction=[("reject", {"over": "token", "high": 0.0})], kl="k3", entropy_weight=0.1)
    logprobs, entropy = trained(2, tokens)
    loss, gradients, sums = whole(algorithm, episodes, tokens, logprobs, entropy)
    summary = algorithm.summary(sums)
    assert loss == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)
    assert summary["noop"] == summary["masked/any"] == summary["masked/reject"] == 1
    assert all(value == value for value in summary.values())


@each_composition
def test_a_pass_without_any_policy_token_is_zero_with_zero_gradient(composition):
    episodes, tokens = random_batch(2)
    algorithm = make_algorithm(**composition)
    prepared = algorithm.prepare(episodes, for_config(tokens, algorithm), alone)
    nothing = replace(prepared, mask=torch.zeros_like(prepared.mask))
    loss, gradients, sums = learn(
        algorithm, nothing, *trained(2, tokens), totals_of(nothing, episodes), [range(episodes.count)]
    )
    assert loss == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)
    assert all(value == value for value in algorithm.summary(sums).values())


def test_a_log_ratio_of_89_gives_a_finite_loss_and_gradient():
    for advantage in ([1.0, 0.0], [0.0, 1.0]):
        old = torch.full((2,), -90.0)
        tokens = make_tokens([[1], [1]], behaviour=old, proximal=old, reference=old)
        algorithm = make_algorithm(kl="k3")
        tokens = algorithm.prepare(make_episodes(advantage, [0, 0]), tokens, alone)
        logprobs = torch.full((2,), -1.0, requires_grad=True)
        loss, _ = algorithm.loss(logprobs, tokens, Totals(2, 2))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()


def test_half_precision_log_probs_are_accumulated_in_float32():
    tokens = make_tokens([[1] * 3000], behaviour=torch.full((3000,), -1.0), proximal=torch.full((3000,), -1.0))
    algorithm = make_algorithm(advantage="reinforce_pp_baseline", loss="gpg", correction=[], aggregation="token-sum")
    prepared = replace(algorithm.prepare(make_episodes([1], [0]), tokens, alone), advantages=torch.ones(3000))
    logprobs = torch.full((3000,), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, prepared, totals_of(tokens))
    loss.backward()
    assert loss.dtype == torch.float64
    # A sum in bfloat16 would stick at 256.
    assert loss.item() == 3000
    assert logprobs.grad.tolist() == [-1] * 3000


def test_interpolation_needs_no_recomputed_log_probs_but_the_versions():
    algorithm = make_algorithm(proximal="interpolate")
    assert not algorithm.needs_proximal
    episodes, tokens = random_batch(0)
    with pytest.raises(InvariantError, match=r"lag is missing \(give Episodes.version\)"):
        algorithm.prepare(replace(episodes, version=None), tokens, alone)


def best_of_n(scores, rewards, **params):
    (change,) = make_algorithm(reward=[("best_of_n", params)]).parts.rewards
    extra = {"process": torch.tensor(scores), "style": torch.tensor(scores)}
    return change(make_episodes(rewards, [0, 0, 1, 1], extra=extra)).tolist()


def test_only_the_best_of_a_group_keeps_its_score_and_to_be_worse_is_never_a_gain():
    assert best_of_n([0.5, 0.25, 0.5, 0.5], [1.5, 1.25, 0.5, 1.5]) == [1.5, 1.0, 0.5, 1.5]
    assert best_of_n([0.5, 0.25, 0.5, 0.5], [1.0, 0.5, 1.0, 1.0], weight=2.0, score="style") == [1.0, 0.0, 1.0, 1.0]
    assert best_of_n([-0.5, -0.75, 0.25, -0.5], [0.5, 0.25, 1.25, 0.5]) == [0.5, 0.25, 1.25, 0.5]


def test_best_of_n_names_the_score_that_is_missing():
    (change,) = make_algorithm(reward=["best_of_n"]).parts.rewards
    with pytest.raises(InvariantError, match=r"the score process is not among \['outcome', 'reward'\]"):
        change(make_episodes([1], [0]))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("behaviour", "behaviour is nan at position 1 of sequence 0; every policy token needs a finite value"),
        ("proximal", "proximal is nan at position 1 of sequence 0"),
        ("reference", "reference is nan at position 1"),
        ("values", "values is nan at position 1"),
    ],
)
def test_a_missing_number_on_a_trainable_token_is_refused_by_its_place_and_a_missing_tensor_by_its_name(field, message):
    episodes = make_episodes([1, 0], [0, 0], lengths=torch.tensor([1, 2]))
    numbers = torch.zeros(4, dtype=torch.float64)
    tokens = make_tokens([[0, 1], [1, 1]], reference=numbers, values=numbers)
    bad = numbers.clone()
    bad[1] = torch.nan
    with pytest.raises(InvariantError, match=message):
        make_algorithm(advantage="gae", kl="k3").prepare(episodes, replace(tokens, **{field: bad}), alone)
    if field != "behaviour":
        with pytest.raises(InvariantError, match=rf"{field} is missing \(Tokens.{field}\)"):
            make_algorithm(advantage="gae", kl="k3").prepare(episodes, replace(tokens, **{field: None}), alone)


def test_shapes_that_differ_are_named_and_nothing_is_broadcast():
    episodes, tokens = random_batch(0)
    algorithm = make_algorithm()
    prepared = algorithm.prepare(episodes, tokens, alone)
    size = tokens.mask.numel()
    with pytest.raises(InvariantError, match=rf"logprobs has shape \[1\]; the tokens have \[{size}\]"):
        algorithm.loss(torch.zeros(1), prepared, totals_of(tokens))
    with pytest.raises(InvariantError, match=r"behaviour has shape \[1\]; it must have"):
        replace(tokens, behaviour=torch.zeros(1))
    with pytest.raises(InvariantError, match=r"mask is torch.float32; it must be torch.bool"):
        replace(tokens, mask=tokens.mask.float())
    with pytest.raises(InvariantError, match=r"reward has shape \[1\]; it must have .* as group has"):
        replace(episodes, reward=torch.zeros(1))
    with pytest.raises(InvariantError, match=r"extra\['style'\] has shape \[1\]"):
        replace(episodes, extra={"style": torch.zeros(1)})


def test_tokens_of_unknown_sequences_and_unprepared_tokens_are_refused():
    episodes, tokens = random_batch(0)
    with pytest.raises(InvariantError, match=rf"sequence reaches 99; it must be in \[0, {episodes.count}\)"):
        make_algorithm().prepare(episodes, replace(tokens, sequence=torch.full_like(tokens.sequence, 99)), alone)
    with pytest.raises(InvariantError, match="advantages are missing"):
        make_algorithm().loss(tokens.behaviour, tokens, totals_of(tokens))
    with pytest.raises(InvariantError, match="entropy is missing"):
        make_algorithm(entropy_weight=0.1).loss(tokens.behaviour, tokens, totals_of(tokens))


def test_a_samplers_importance_weights_multiply_the_advantages_of_their_sequences() -> None:
    episodes, tokens = random_batch(3)
    algorithm = make_algorithm(advantage="grpo")
    plain = algorithm.prepare(episodes, tokens, alone)
    weights = torch.linspace(0.25, 1.0, episodes.count, dtype=episodes.reward.dtype)
    weighted = algorithm.prepare(replace(episodes, priority=weights), tokens, alone)
    assert plain.advantages is not None
    assert weighted.advantages is not None
    torch.testing.assert_close(weighted.advantages, plain.advantages * weights[tokens.sequence])
