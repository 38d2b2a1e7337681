from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages.base import step_lengths, step_tokens
from asyncrl.algorithms.batch import Totals
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import InvariantError
from tests.algorithms.support import make_episodes, make_tokens

MASKS = [[0, 1, 1, 0, 1], [0, 0], [1], [0, 1, 1, 1]]
"""Two turns; no policy token at all; a single token; one turn."""


def test_the_view_knows_sequences_turns_and_neighbours():
    view = PolicyTokens.of(make_tokens(MASKS))
    assert view.index.tolist() == [1, 2, 4, 7, 9, 10, 11]
    assert view.sequences.lengths.tolist() == [3, 0, 1, 3]
    assert view.sequences.last.tolist() == [2, 3, 6]
    assert view.turns().lengths.tolist() == [2, 1, 1, 3]
    assert view.shift(torch.arange(1, 8)).tolist() == [2, 3, 0, 0, 6, 7, 0]
    assert view.by_sequence(torch.tensor([5, 6, 7, 8])).tolist() == [5, 5, 5, 7, 8, 8, 8]
    assert view.scatter(torch.ones(7)).tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1]


@pytest.mark.slow
@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=5))
def test_a_view_is_the_same_as_counted_token_by_token_with_gradients_or_without(masks):
    masks = [mask for mask in masks if mask]
    tokens = make_tokens(masks) if masks else make_tokens([[1]]).select(torch.empty(0, dtype=torch.int64))
    view = PolicyTokens.of(tokens)
    flags = [flag for mask in masks for flag in mask]
    assert view.index.tolist() == [place for place, flag in enumerate(flags) if flag]
    assert view.sequences.lengths.tolist() == [sum(mask) for mask in masks]
    assert view.starts.tolist() == [sum(map(len, masks[:k])) for k in range(len(masks))]
    values = torch.arange(1.0, len(masks) + 1)
    expected = [k + 1.0 for k, mask in enumerate(masks) for flag in mask if flag]
    for given_values in (values, values.clone().requires_grad_(), values.bfloat16()):
        assert view.by_sequence(given_values).tolist() == expected


def test_segments_reduce_each_span_by_itself_and_an_empty_one_to_nothing():
    spans = PolicyTokens.of(make_tokens(MASKS)).sequences
    values = torch.tensor([1.0, 2, 6, torch.inf, 3, 4, 5])
    assert spans.sum(values).tolist() == [9, 0, torch.inf, 12]
    assert spans.mean(values).tolist() == [3, 0, torch.inf, 4]
    assert spans.max(values).tolist() == [6, -torch.inf, torch.inf, 5]


def test_a_narrowed_view_keeps_its_sequences():
    view = PolicyTokens.of(make_tokens(MASKS)).narrow(torch.tensor([1, 0, 1, 0, 0, 0, 1], dtype=torch.bool))
    assert view.index.tolist() == [1, 4, 11]
    assert view.sequences.lengths.tolist() == [2, 0, 0, 1]
    assert view.owner.tolist() == [0, 1, 2, 3]


def test_a_token_that_is_left_out_does_not_end_its_turn() -> None:
    view = PolicyTokens.of(make_tokens(MASKS)).narrow(torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool))
    narrower = view.narrow(torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)).moved(lambda tensor: tensor.clone())
    assert view.turns().lengths.tolist() == [2, 0, 1, 2]
    assert narrower.index.tolist() == [1, 2, 9, 11]
    assert narrower.turns().lengths.tolist() == [2, 0, 0, 2]


def test_an_empty_batch_has_an_empty_view():
    view = PolicyTokens.of(make_tokens(MASKS).select(torch.empty(0, dtype=torch.int64)))
    assert view.index.numel() == view.owner.numel() == view.sequences.lengths.numel() == 0
    assert view.turns().lengths.numel() == 0


def test_a_sequence_in_two_pieces_is_refused():
    tokens = make_tokens(MASKS)
    with pytest.raises(InvariantError, match="must lie together"):
        PolicyTokens.of(tokens.select(torch.tensor([0, 5, 1])))


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("token-mean", {}, 3.0),
        ("token-sum", {}, 15.0),
        ("seq-mean-token-sum", {}, 7.5),
        ("seq-mean-token-mean", {}, 2.75),
        ("seq-mean-token-sum-norm", {"norm": 3}, 2.5),
    ],
)
def test_each_aggregation_gives_its_number(name, params, expected):
    view = PolicyTokens.of(make_tokens([[1, 1, 0], [1, 1, 1]]))
    losses = view.take(torch.tensor([1.0, 2, 9, 3, 4, 5]))
    result = registry.build("aggregation", name, params)(losses, view.sequences, view.sequences.lengths, Totals(5, 2))
    assert result.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@given(st.integers(0, 600), st.integers(0, 1000))
def test_the_scan_equals_the_loop_over_tokens(size, seed):
    generator = torch.Generator().manual_seed(seed)
    decay = torch.rand(size, generator=generator, dtype=torch.float64) * 1.1
    decay[torch.rand(size, generator=generator) < 0.05] = 0
    value = torch.randn(size, generator=generator, dtype=torch.float64)
    expected, after = [0.0] * size, 0.0
    for t in range(size - 1, -1, -1):
        after = expected[t] = float(value[t]) + float(decay[t]) * after
    copies = decay.clone(), value.clone()
    torch.testing.assert_close(
        linear_scan(decay, value), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(decay, copies[0])
    assert torch.equal(value, copies[1])


@pytest.mark.parametrize(
    ("steps", "here", "expected"),
    [
        ([(0, 3, 0.5), (0, 5, 0.25), (3, 4, 1.0)], range(12), ([0, 1, 2], [1, 2, 6], [2, 1, 3])),
        # A step that ends on a tool token lands on the policy token before it.
        ([(0, 4, 0.5)], range(12), ([0], [1], [2])),
        # The first sequence is on another rank.
        ([(0, 3, 0.5), (3, 4, 1.0)], range(8, 12), ([1], [2], [0, 3])),
    ],
)
def test_a_steps_score_lands_on_its_last_policy_token(steps, here, expected):
    episodes, tokens = make_episodes([0] * 4, [0] * 4, steps=steps), make_tokens(MASKS).select(torch.tensor(here))
    found = (
        *step_tokens(episodes, tokens, PolicyTokens.of(tokens)),
        step_lengths(episodes, tokens, PolicyTokens.of(tokens)),
    )
    assert tuple(each.tolist() for each in found) == expected


@pytest.mark.parametrize("end", [0, 1, 6, 40])
def test_a_step_outside_its_sequence_or_before_any_policy_token_is_refused(end):
    episodes = make_episodes([0] * 4, [0] * 4, steps=[(0, end, 0.5)])
    tokens = make_tokens(MASKS)
    with pytest.raises(InvariantError, match=f"step_end={end} of sequence 0"):
        step_tokens(episodes, tokens, PolicyTokens.of(tokens))


def test_group_statistics_are_those_of_each_group():
    groups = Groups.of(torch.tensor([0, 1, 0, 1, 1]))
    values = torch.tensor([1.0, 2, 3, 4, 9])
    assert groups.size().tolist() == [2, 3, 2, 3, 3]
    assert groups.centre(values).tolist() == [-1, -3, 1, -1, 4]
    assert groups.std(values).tolist() == pytest.approx([2**0.5, 13**0.5, 2**0.5, 13**0.5, 13**0.5])
    assert groups.least(values).tolist() == [1, 2, 1, 2, 2]
    assert groups.greatest(values).tolist() == [3, 9, 3, 9, 9]
