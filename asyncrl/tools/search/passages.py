"""Passages of text, the interface of their sources, and the form in which the policy reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

LONGEST_TITLE = 200
NOTHING = "No passages found."


class TitledPassage(NamedTuple):
    """A passage with its title, which may be empty."""

    title: str
    text: str


class PassageSource(Protocol):
    """Finds passages for all episodes of an actor."""

    def prepare(self) -> None:
        """Check the source, when an actor starts and before a run. Raises ConfigError if it cannot be used."""
        ...

    async def find(self, query: str, topk: int) -> Sequence[TitledPassage]:
        """Find at most `topk` passages, the best first. Any exception is a failure of the tool."""
        ...


def passage_of(contents: str) -> TitledPassage:
    """Read a passage whose first line is its title, the form of FlashRAG and Search-R1."""
    title, text = (part.strip() for part in contents.split("\n", 1)) if "\n" in contents else ("", contents.strip())
    return TitledPassage(title, text) if text else TitledPassage("", title)


def shown(passages: Sequence[TitledPassage], max_chars: int) -> str:
    """The passages in the form of Search-R1, one line for each: `Doc 1(Title: T) text`.

    Together the lines have at most `max_chars` characters. Each line is cut to an equal share of these.
    """
    if not passages:
        return NOTHING[:max_chars]
    share = max(1, max_chars // len(passages) - 1)
    return "\n".join(_shown(number, each, share) for number, each in enumerate(passages, 1))


def _shown(number: int, passage: TitledPassage, max_chars: int) -> str:
    line = f"Doc {number}(Title: {_begin(passage.title, LONGEST_TITLE)}) {passage.text}".strip()
    return _begin(line, max_chars)


def _begin(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
