"""Describes the members of a group side by side: their rewards, their texts, and the place where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from asyncrl.dashboard.pieces import TokenSpan, token_pieces
from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.types import Role, Trajectory, common_prefix

FIRST_TOKENS = 80
LAST_TOKENS = 24
BEFORE_THE_PARTING = 12


def describe_group(members: Sequence[KeptEpisode], chosen: str, vocabulary: Vocabulary) -> dict[str, Any]:
    """Describe the members in order.

    - `common`: the number of first tokens that all members share;
    - `same`: the number of first tokens that a member shares with the `chosen` one;
    - `before`, `after`: a member's text before and after the first token in which it differs from the chosen member.
      For the chosen member, this is the first token in which any other member differs from it.
    """
    ordered = sorted(members, key=lambda each: each.row.member)
    reference = next((each for each in ordered if each.row.id == chosen), ordered[0])
    begins = [common_prefix(each.trajectory.tokens, reference.trajectory.tokens) for each in ordered]
    common = min(begins)
    parts = [common if each is reference else same for each, same in zip(ordered, begins, strict=True)]
    described = [
        {"same": same, **_member(each, part, vocabulary)}
        for each, same, part in zip(ordered, begins, parts, strict=True)
    ]
    return {"common": common, "members": described}


def _member(episode: KeptEpisode, part: int, vocabulary: Vocabulary) -> dict[str, Any]:
    trajectory = episode.trajectory
    advantages = episode.advantages[trajectory.loss_mask]
    own = [TokenSpan(turn.start, turn.end) for turn in trajectory.turns if turn.role is Role.ASSISTANT]
    last = own[-1] if own else TokenSpan(0, 0)
    return {
        **plain(structs.asdict(episode.row)),
        "advantage": plain(float(advantages.mean())),
        "advantages_differ": bool(np.ptp(advantages) > 0),
        "before": _text(trajectory, TokenSpan(max(0, part - BEFORE_THE_PARTING), part), vocabulary),
        "after": _text(trajectory, TokenSpan(part, min(part + FIRST_TOKENS, len(trajectory))), vocabulary),
        "last": _text(trajectory, TokenSpan(max(last.start, last.end - LAST_TOKENS), last.end), vocabulary),
    }


def _text(trajectory: Trajectory, span: TokenSpan, vocabulary: Vocabulary) -> str:
    # A few tokens to the left complete a character that begins before the span.
    start = max(0, span.start - 8)
    pieces = token_pieces(trajectory.tokens[start : span.end].tolist(), vocabulary.decode)
    return "".join(pieces[span.start - start :])
