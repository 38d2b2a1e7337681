"""The limits of an episode: the room that they leave for a completion, and the errors of requests without room."""

from __future__ import annotations

from dataclasses import dataclass

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
