"""Where process scores land: from a step's end in its own sequence to the policy token that carries its score."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.view import View
from asyncrl.errors import InvariantError


def step_places(episodes: Episodes, tokens: Tokens, view: View) -> tuple[Tensor, Tensor]:
    """The steps of the sequences that are here, int64[k] into the K steps, and the place in [M] of each one's last
    policy token, int64[k].

    Raises InvariantError: a step ends outside its sequence, or before the sequence's first policy token.
    """
    starts, first = _starts(episodes, view)
    step = (starts[episodes.step_sequence] >= 0).nonzero().squeeze(1)
    sequence, end = episodes.step_sequence[step], episodes.step_end[step]
    packed = starts[sequence] + end - 1 - tokens.position[starts[sequence]]
    inside = (packed >= 0) & (packed < view.packed)
    packed = packed.clamp(0, max(0, view.packed - 1))
    inside &= (tokens.sequence[packed] == sequence) & (tokens.position[packed] == end - 1)
    place = torch.searchsorted(view.index, packed, right=True) - 1
    inside &= place >= first[sequence]
    if not bool(inside.all()):
        bad = int((~inside).nonzero()[0])
        raise InvariantError(
            f"step_end={int(end[bad])} of sequence {int(sequence[bad])}: a step must end inside its sequence, at or "
            "after its first policy token, and positions must count up by one"
        )
    return step, place


def step_lengths(episodes: Episodes, tokens: Tokens, view: View) -> Tensor:
    """float64[K]: the policy tokens of each step, from the previous step's end on; 0 for steps that are not here."""
    step, place = step_places(episodes, tokens, view)
    _, first = _starts(episodes, view)
    sequence = episodes.step_sequence[step]
    before = first[sequence] - 1
    follows = sequence[1:] == sequence[:-1]
    before[1:] = torch.where(follows, place[:-1], before[1:])
    lengths = torch.zeros(episodes.step_end.numel(), dtype=torch.float64, device=place.device)
    return lengths.index_copy_(0, step, (place - before).double())


def _starts(episodes: Episodes, view: View) -> tuple[Tensor, Tensor]:
    """By sequence of the global batch: its first packed token, and its first policy token's place in [M]; -1 where it
    is not here or has no policy token."""
    lengths = view.sequences.lengths
    present = lengths > 0
    absent = torch.full((episodes.count,), -1, dtype=torch.int64, device=lengths.device)
    starts = absent.index_copy(0, view.owner[present], view.starts[present])
    return starts, absent.index_copy(0, view.owner[present], (lengths.cumsum(0) - lengths)[present])
