"""What the door counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DoorCounts:
    """Since the start: requests answered, refused, and abandoned (the agent did not wait for the answer, which is then
    no part of its episode), and branches with an answer."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0
