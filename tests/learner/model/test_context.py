"""The parts of a pass that several ranks divide are the whole pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Meeting, Membership
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.packed_layout import PackedLayout, has_paths


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.booleans())
def test_the_parts_of_a_pass_are_its_tokens_and_each_query_keeps_its_keys(lengths: list[int], size: int, alike: bool):
    sequences = [torch.arange(length) if alike else torch.arange(length) + 10 * n for n, length in enumerate(lengths)]
    whole = PackedSequences.of(sequences, EVERY if alike else None)
    parts = [whole.divided(ContextGroup("", size, rank)) for rank in range(size)]
    ids = torch.cat([part.computed[0] for part in parts])
    assert ids[: len(whole.ids)].equal(whole.ids)
    assert len(ids) - len(whole.ids) < size
    expected, seen = keys_of(whole.layout), {}
    for rank, each in enumerate(parts):
        assert each.part is not None
        assert each.layout.own is not None
        assert len(each.computed[0]) == len(ids) // size
        seen |= {rank * len(ids) // size + row: keys for row, keys in keys_of(each.layout.own).items()}
        assert each.targets.equal(whole.targets[each.part.needed])
        assert each.computed[0][each.sources].equal(whole.ids[whole.sources][each.part.needed])
    assert {row: seen[row] for row in expected} == expected
    order = torch.cat([each.part.needed for each in parts if each.part is not None])
    assert sorted(order.tolist()) == list(range(len(whole.needed)))


def keys_of(layout: PackedLayout) -> dict[int, list[int]]:
    """The tokens that each query sees."""
    every = torch.arange(int(layout.bounds[1, -1])) if not has_paths(layout.paths, layout.bounds) else layout.paths
    (starts, firsts), (stops, lasts) = layout.bounds[:, :-1].tolist(), layout.bounds[:, 1:].tolist()
    return {
        row: every[first : last - (stop - row) + 1].tolist()
        for start, stop, first, last in zip(starts, stops, firsts, lasts, strict=True)
        for row in range(start, stop)
    }


def test_groups_that_the_ranks_of_a_copy_cannot_be_dealt_out_to_are_refused():
    with (
        pytest.raises(ConfigError, match=r"learner\.context_ranks=2 learner\.replicas=2: 6 ranks .* a multiple of 4"),
        joined(2, member=Membership(0, 0, Meeting(0, 6, "nowhere")), context_ranks=2),
    ):
        pass
