"""Players of games of textarena."""

import re


def first_free(observation: str) -> str:
    """Takes the first of the moves that the game offered last."""
    return re.findall(r"'(\[\d\])'", observation.rpartition("Available Moves")[2])[0]


class FirstFree:
    """The same as an object of an episode."""

    def __call__(self, observation: str) -> str:
        return first_free(observation)
