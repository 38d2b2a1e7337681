"""Keeps dead letters: failed attempts, each with its reason, and with its episode if the episode was stored."""

from __future__ import annotations

from asyncrl.errors import RefusedError
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import DeadLetter, forget
from asyncrl.replay.store.transaction import Transaction


class DeadLetters:
    """Keeps dead letters, up to the limits in the settings. Each call is part of the caller's transaction."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._max_count = settings.max_dead_letters
        self._max_bytes = settings.max_dead_letter_bytes
        self._keeps_episodes = settings.keeps_all

    def add(self, tx: Transaction, ticket: str, dead: DeadLetter) -> None:
        """Keep a dead letter, with its episode if that is stored. If there are too many, delete the oldest ones."""
        dead.order = tx.append("dead_by_age", ticket)
        dead.size = len(dead.reason) + tx.size("data", ticket) + tx.size("labels", ticket)
        dead.save(tx, ticket)
        tx.add("dead_letter_bytes", dead.size)
        while tx.count("dead") > self._max_count or tx.counter("dead_letter_bytes") > self._max_bytes:
            oldest = tx.first("dead_by_age", str)
            if oldest is None:
                return
            self.retire(tx, oldest[1])
            tx.add("dead_letters_dropped")

    def get(self, tx: Transaction, ticket: str) -> DeadLetter:
        """The dead letter of a ticket. Raises RefusedError: it does not exist."""
        dead = DeadLetter.load(tx, ticket)
        if dead is None:
            raise RefusedError(f"there is no dead letter {ticket}; `asyncrl inspect dead-letters` lists them")
        return dead

    def discard(self, tx: Transaction, ticket: str) -> None:
        """Delete a dead letter and its episode. Raises RefusedError: it does not exist."""
        self.remove(tx, ticket)
        forget(tx, ticket)

    def retire(self, tx: Transaction, ticket: str) -> None:
        """Delete a dead letter, and also its episode unless the run keeps all episodes."""
        self.remove(tx, ticket)
        if self._keeps_episodes:
            tx.add("kept_untrained")
        else:
            forget(tx, ticket)

    def remove(self, tx: Transaction, ticket: str) -> None:
        """Delete a dead letter, but keep its episode. Raises RefusedError: it does not exist."""
        dead = self.get(tx, ticket)
        tx.delete("dead", ticket)
        tx.delete("dead_by_age", dead.order)
        tx.add("dead_letter_bytes", -dead.size)
