"""Splits the policy's turn into its thoughts, `<think>...</think>`, and the content after them.

The text after the last `</think>` is the content. Some chat templates (QwQ, models distilled from R1) open the thought
in the generation prompt. With such a template, a turn has only `</think>`.
"""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """Split a turn into its thought and its content. `opened`: the prompt ended within a thought.

    If a thought has no end, the whole turn is the thought.
    """
    before, closing, content = text.rpartition(CLOSING)
    if not closing:
        if not opened and not text.lstrip().startswith(OPENING):
            return "", text
        before, content = text, ""
    return before.strip().removeprefix(OPENING).strip(), content.lstrip()


def join_thought(thought: str, content: str) -> str:
    """The text of a turn with a thought, as most templates write it."""
    return f"{OPENING}\n{thought}\n{CLOSING}\n\n{content}"
