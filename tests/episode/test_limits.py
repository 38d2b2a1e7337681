"""The room that the limits of an episode leave, and the errors of requests without room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.episode.limits import EpisodeLimits, LimitError

LIMITS = EpisodeLimits(max_turns=6, max_turn_tokens=100, max_tokens=150, max_total_tokens=400)


@pytest.mark.parametrize(("seen", "taken", "room"), [(10, 10, 100), (120, 120, 30), (10, 380, 20), (150, 150, 0)])
def test_the_smallest_of_three_limits_is_the_room(seen: int, taken: int, room: int) -> None:
    assert LIMITS.room(1, seen, taken) == room


def test_an_episode_without_turns_has_no_room() -> None:
    assert LIMITS.room(0, 10, 10) == 0


@pytest.mark.parametrize(
    ("turns", "seen", "total", "key"),
    [(0, 10, 10, "actor.max_turns"), (1, 150, 150, "actor.max_tokens"), (1, 10, 400, "actor.max_total_tokens")],
)
def test_a_refusal_names_the_key_of_the_limit(turns: int, seen: int, total: int, key: str) -> None:
    assert key in str(LIMITS.refusal(turns, seen, total))


def test_a_prompt_that_fits_is_not_copied() -> None:
    tokens = np.arange(5, dtype=np.int32)
    assert replace(LIMITS, max_prompt_length=5).fitting_prompt(tokens, may_cut=False) is tokens


def test_a_long_prompt_is_cut_or_refused() -> None:
    tokens, limits = np.arange(8, dtype=np.int32), replace(LIMITS, max_prompt_length=5, truncation="left")
    assert limits.fitting_prompt(tokens, may_cut=True).tolist() == [3, 4, 5, 6, 7]
    for each, may_cut in ((limits, False), (replace(limits, truncation="error"), True)):
        with pytest.raises(LimitError, match=r"data\.max_prompt_length=5") as refused:
            each.fitting_prompt(tokens, may_cut)
        assert refused.value.code == "context_length_exceeded"
