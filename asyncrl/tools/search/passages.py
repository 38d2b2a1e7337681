"""Passages, where they come from, and how the policy reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

LONGEST_TITLE = 200
NOTHING = "No passages found."


class TitledPassage(NamedTuple):
    title: str
    text: str


class PassageSource(Protocol):
    """What finds passages for all episodes of an actor."""

    def prepare(self) -> None:
        """Called when an actor starts, and before a run does. Raises ConfigError: it cannot be used."""
        ...

    async def find(self, query: str, topk: int) -> Sequence[TitledPassage]:
        """At most `topk` passages, the best first. Whatever is raised is a failure of the tool."""
        ...


def passage_of(contents: str) -> TitledPassage:
    """A passage whose first line is its title, as FlashRAG and Search-R1 write it."""
    title, _, text = contents.partition("\n")
    return TitledPassage(title, text) if text else TitledPassage("", title)


def shown(passages: Sequence[TitledPassage], max_chars: int) -> str:
    """The passages in the form of Search-R1, a line each: `Doc 1(Title: T) text`. All together have at most `max_chars`
    characters, of which each passage gets an equal share, so that none of them is lost to a long one."""
    if not passages:
        return NOTHING[:max_chars]
    share = max(1, max_chars // len(passages) - 1)
    return "\n".join(_shown(number, each, share) for number, each in enumerate(passages, 1))


def _shown(number: int, passage: TitledPassage, max_chars: int) -> str:
    line = f"Doc {number}(Title: {_begin(passage.title, LONGEST_TITLE)}) {passage.text}".strip()
    return _begin(line, max_chars)


def _begin(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
