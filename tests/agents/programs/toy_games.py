"""Games of ours, which the program `gym_agent` makes in another process."""

from __future__ import annotations

import random
import sys
from typing import Any


class Guess:
    """A game whose secret is drawn by the random generator of the process, as in games of others."""

    def __init__(self, largest: int = 9, breaks_at: str = "", seeded: bool = True, asks_at: str = "") -> None:
        self._largest, self._breaks_at, self._seeded, self._asks_at = largest, breaks_at, seeded, asks_at

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        if self._seeded:
            random.seed(seed)
        self._secret = random.randint(1, self._largest)
        order = ", ".join({"north", "south", "east", "west"})
        sys.stdout.write("a game may print what it likes\n")
        return f"Guess a number up to {self._largest} (hint: {self._secret}; {order}).", {"suffix": "Your guess?"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == self._breaks_at:
            raise RuntimeError("the board fell from the table")
        if action == self._asks_at:
            input()
        found = action == str(self._secret)
        return "found" if found else "wrong", 1.0 if found else -0.25, found, False, {"suffix": "Your guess?"}


def silent_game() -> Any:
    class Silent:
        def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
            return [0, 1], {}

    return Silent()
