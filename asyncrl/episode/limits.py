"""The limits of an episode: the room that they leave for a completion, and the errors of requests without room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.prompt_lengths import cut_prompt
from asyncrl.errors import RefusedError


class LimitError(RefusedError):
    """A limit of the episode leaves no room for a completion. `code` is the chat-completions API's error code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode.

    - `max_turns`: how many completions the episode may have
    - `max_turn_tokens`: how many tokens one completion may have
    - `max_tokens`: how many tokens one branch may have, with prompts and tool results
    - `max_total_tokens`: how many tokens all branches together may have
    - `max_prompt_length`: how many tokens the first prompt may have; None: no limit
    - `truncation`: what happens to a first prompt that is too long. It is cut (left, right, middle) or refused (error)
    """

    max_turns: int
    max_turn_tokens: int
    max_tokens: int
    max_total_tokens: int
    max_prompt_length: int | None = None
    truncation: str = "error"

    def room(self, turns: int, seen: int, taken: int) -> int:
        """The number of tokens that a completion after `seen` tokens of its branch may have. The episode may have
        `turns` more completions, and its branches take `taken` tokens together."""
        if turns < 1:
            return 0
        return min(self.max_turn_tokens, self.max_tokens - seen, self.max_total_tokens - taken)

    def refusal(self, turns: int, seen: int, total: int) -> LimitError:
        """Make the error of a request for which there is no `room`. With the prompt of the request, the branches have
        `total` tokens."""
        if turns < 1:
            return LimitError("turn_limit", f"the episode has reached actor.max_turns={self.max_turns}")
        if seen >= self.max_tokens:
            reason = (
                f"the conversation has {seen} tokens, which leaves no room: the maximum context length is "
                f"actor.max_tokens={self.max_tokens}"
            )
        else:
            reason = (
                f"the episode has {total} tokens, which leaves no room: the maximum context length of its sequences "
                f"together is actor.max_total_tokens={self.max_total_tokens}"
            )
        return LimitError("context_length_exceeded", reason)

    def fitting_prompt(self, tokens: NDArray[np.int32], may_cut: bool) -> NDArray[np.int32]:
        """Cut the first prompt to its limit if it is too long. Returns the prompt. Raises LimitError: the prompt is too
        long, and may not be cut."""
        limit = self.max_prompt_length
        if limit is None or len(tokens) <= limit:
            return tokens
        if self.truncation == "error" or not may_cut:
            reason = (
                f"the prompt has {len(tokens)} tokens; its maximum context length is data.max_prompt_length={limit}"
            )
            raise LimitError("context_length_exceeded", reason)
        return cut_prompt(tokens, limit, self.truncation)
