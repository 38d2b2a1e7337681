"""Places spans on the lines of a picture: spans on one line lie within each other or follow each other."""

from __future__ import annotations


class Lanes:
    """The lines of one track. Spans come in the order of their starts. Of spans with equal starts, the longer
    ones come first."""

    def __init__(self) -> None:
        self._ends: list[list[int]] = []

    def place(self, start: int, end: int) -> int:
        """The first line that is free, or on which the span lies within another one."""
        for lane, ends in enumerate(self._ends):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return lane
        self._ends.append([end])
        return len(self._ends) - 1


class Slots:
    """Gives each running episode its own slot. A later episode takes the slot of an episode that has ended."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._owners: list[tuple[str, int]] = []

    def slot_of(self, episode: str, start: int, end: int) -> int:
        """The slot of a span of an episode. Spans come in the order of their starts."""
        slot = self._slots.get(episode)
        if slot is None:
            free = (index for index, (_, until) in enumerate(self._owners) if until <= start)
            slot = next(free, len(self._owners))
            if slot == len(self._owners):
                self._owners.append((episode, end))
            else:
                del self._slots[self._owners[slot][0]]
            self._slots[episode] = slot
            self._owners[slot] = episode, end
        self._owners[slot] = episode, max(end, self._owners[slot][1])
        return slot
