"""What the door counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DoorCounts:
    """Since the start: requests answered, refused, and abandoned (the agent hung up before the answer was ready, and it
    is no part of the episode), and branches with an answer."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0
