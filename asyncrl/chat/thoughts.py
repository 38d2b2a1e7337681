"""The thoughts in the policy's turn, `<think>...</think>`, and the content after them.

The text after the last `</think>` is the content. If a chat template opens the thought in the generation prompt, as
those of QwQ and the distills of R1 do, the turn has its end only.
"""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """Split a turn into its thought and its content. `opened`: the prompt ended within a thought. A thought without an
    end is all of the turn."""
    before, closing, content = text.rpartition(CLOSING)
    if not closing:
        if not opened and not text.lstrip().startswith(OPENING):
            return "", text
        before, content = text, ""
    return before.strip().removeprefix(OPENING).strip(), content.lstrip()


def join_thought(thought: str, content: str) -> str:
    """The text of a turn, as most templates that show thoughts write it."""
    return f"{OPENING}\n{thought}\n{CLOSING}\n\n{content}"
