"""Prefixes that sequences share are computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig, PartConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY, Sharing, find_shared
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import Run, assert_weights_close, make_config, with_critic

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.25, "pad_token_id": 0}
WINDOW = {"sliding_window": 6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": WINDOW,
    "gemma": {"head_dim": 16},
    "gemma3_text": {**WINDOW, "head_dim": 16, "num_hidden_layers": 6},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}

# Few token ids and short lengths make prefixes of prefixes, whole copies, and sequences that are another's prefix.
sequences_of_pass = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def joined(sequences: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(each, np.int64) for each in sequences])


@given(sequences_of_pass)
def test_each_prefix_is_computed_once_and_each_path_leads_to_its_sequence(sequences: list[list[int]]):
    ids, lengths = joined(sequences), [len(each) for each in sequences]
    prefixes = {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}
    shared = find_shared(ids, lengths, EVERY)
    if shared is None:
        assert len(prefixes) == len(ids)
        return
    assert len(shared.kept) == len(prefixes) == sum(shared.queries)
    assert (ids[shared.kept][shared.rows] == ids).all()
    assert [ids[shared.kept][rows].tolist() for rows in np.split(shared.rows, np.cumsum(lengths)[:-1])] == sequences
    paths = np.split(shared.paths, np.cumsum(shared.keys)[:-1])
    ends = np.cumsum(shared.queries)
    for path, queries, end in zip(paths, shared.queries, ends, strict=True):
        assert path[-queries:].tolist() == list(range(end - queries, end))
        assert ids[shared.kept][path].tolist() in [each[: len(path)] for each in sequences]


@given(sequences_of_pass, st.integers(1, 12), st.floats(0, 1))
def test_prefixes_that_are_too_short_are_not_shared(sequences: list[list[int]], least: int, share: float):
    shared = find_shared(joined(sequences), [len(each) for each in sequences], Sharing(least, share))
    if shared is not None:
        for queries, keys in zip(shared.queries, shared.keys, strict=True):
            assert queries == keys or keys - queries >= max(least, share * keys)


@given(st.integers(1, 12), st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(0, 9))
def test_a_pass_computes_a_prompt_once_for_all_members_but_those_for_which_it_is_too_short(
    prompt: int, answers: list[int], seed: int
):
    """The schedule relies on this, for any order of the tokens of the answers."""
    rng = np.random.default_rng(seed)
    sequences = [[*range(prompt), *rng.permutation(range(100, 100 + answer)).tolist()] for answer in answers]
    lengths, sharing = [len(each) for each in sequences], Sharing(1, 1 / 4)
    shared = find_shared(joined(sequences), lengths, sharing)
    computed = sum(lengths) if shared is None else len(shared.kept)
    assert computed <= sum(lengths) - sum(prompt for length in lengths[1:] if sharing.takes(prompt, length))


@st.composite
def groups_of_episodes(draw: st.DrawFn) -> list[list[int]]:
    """Groups of sequences that begin with the group's prompt; some go on from a part of the member before them."""
    sequences: list[list[int]] = []
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for _ in range(draw(st.integers(1, 3))):
        prompt = member = rng.integers(0, 61, draw(st.integers(1, 14))).tolist()
        for _ in range(draw(st.integers(1, 4))):
            start = member[: draw(st.integers(1, len(member)))] if draw(st.booleans()) else prompt
            member = [*start, *rng.integers(0, 61, draw(st.integers(0, 9))).tolist()]
            sequences.append(member)
    return sequences


def outputs(policy: Policy, packed: PackedSequences) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies, and the gradients of their weighted mean."""
    logprobs, entropy = policy(packed, with_entropy=True)
    assert entropy is not None
    weights = torch.linspace(-1, 1, len(logprobs))
    (weights * (logprobs + 0.3 * entropy)).mean().backward()
    gradients = [parameter.grad.full_tensor().clone() for parameter in policy.parameters()]
    policy.zero_grad()
    return [logprobs.detach(), entropy.detach()], gradients


def assert_nothing_changes(policy: Policy, sequences: list[list[int]], drawn: float) -> None:
    """Some of the tokens are needed, others not, also where sequences share them."""
    lengths = [len(each) for each in sequences]
    ids = torch.from_numpy(joined(sequences))
    positions = torch.cat([torch.arange(length) for length in lengths])
    mask = (torch.rand(len(ids), generator=torch.Generator().manual_seed(1)) < drawn) & (positions > 0)
    if not mask.any():
        return
    expected, ours = (
        outputs(policy, PackedSequences.build(ids, positions, mask, lengths, sharing)) for sharing in (None, EVERY)
    )
    for left, right in zip([*ours[0], *ours[1]], [*expected[0], *expected[1]], strict=True):
        # The terms of a sum round in another order; its error is that of the largest ones.
        size = max(1.0, float(right.abs().max()))
        torch.testing.assert_close(left, right, atol=1e-5 * size, rtol=1e-4)


@pytest.fixture(scope="module", params=MODELS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Policy:
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**SIZES, "num_hidden_layers": 2, **MODELS[request.param]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_policy(ModelConfig(str(folder)), 0.7, ranks, 64)


@settings(max_examples=15, deadline=None)
@given(sequences=groups_of_episodes(), drawn=st.sampled_from([0.2, 1.0]))
def test_log_probs_and_gradients_are_those_of_whole_sequences(policy: Policy, sequences: list[list[int]], drawn: float):
    assert_nothing_changes(policy, sequences, drawn)


@pytest.mark.parametrize("beside", ["critic and reference", "implicit model"])
def test_every_model_trains_the_same_with_shared_prefixes(beside: str, model: Path, ranks: Ranks, tmp_path: Path):
    runs = []
    for shares in (True, False):
        config = make_config(model, tmp_path / str(shares), steps=3, shared_prefixes=shares, micro_tokens=256)
        if beside == "implicit model":
            config.algorithm.advantage = PartConfig("prime", {"beta": 0.1})
            config.implicit.train = True
        else:
            with_critic(config)
        runs.append(Run(config, alike=True).train(ranks))
    ours, expected = runs
    assert_weights_close(ours.final, expected.final, atol=1e-5)
    assert ours.metrics.of("loss") == pytest.approx(expected.metrics.of("loss"), abs=1e-6)
    assert ours.metrics.of("grad_norm") == pytest.approx(expected.metrics.of("grad_norm"), rel=1e-4)
