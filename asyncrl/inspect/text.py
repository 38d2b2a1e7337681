"""Strange text on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text that does nothing to a terminal: what a policy, a tool or a worker wrote may hold escape sequences."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
