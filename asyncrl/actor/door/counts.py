"""What the door counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DoorCounts:
    """Since the start: requests answered and refused, branches, and sampled tokens outside an episode's main branch."""

    answered: int = 0
    refused: int = 0
    branches: int = 0
    dropped_tokens: int = 0
