"""Reward functions of TRL for test runs."""

from __future__ import annotations

from typing import Any


def letters(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """The share of letters in a completion, which must be a text, since the prompt is one."""
    assert all(isinstance(each, str) for each in (*prompts, *completions))
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


async def of_even_rows(completions: list[str], level: list[int], trainer_state: Any, **kwargs: Any) -> list[Any]:
    """2, for rows with an even level only."""
    assert 0 <= trainer_state.global_step <= trainer_state.max_steps
    return [2.0 if each % 2 == 0 else None for each in level]
