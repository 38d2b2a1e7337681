"""Dead letters: attempts that were given up, why, and how they come back."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import RefusedError
from asyncrl.replay.groups import EVALUATION, Groups
from asyncrl.replay.labelling import Labelling
from asyncrl.replay.records import Facts, Group, Letter, State
from asyncrl.replay.store import Transaction


class Letters:
    """What people do with dead letters, each call within the caller's transaction."""

    def __init__(self, groups: Groups, labelling: Labelling) -> None:
        self._groups = groups
        self._labelling = labelling

    def requeue(self, tx: Transaction, ticket: str) -> str:
        """Put a dead letter back; returns how.

        "scoring": the episode is there and its group still waits for a replacement, so it is scored again itself.
        "task": else its task runs again as a group of its own, before the feed goes on. Raises RefusedError: there is
        no such letter, or its task is a held-out one whose evaluation is over.
        """
        letter = self._letter(tx, ticket)
        if self._still_wanted(tx, ticket, letter):
            self._reinstate(tx, ticket, letter)
            self._groups.remove_letter(tx, ticket)
            return "scoring"
        if letter.row < 0:
            held_out = ticket.startswith(EVALUATION)
            over = "ran a held-out task, whose evaluation" if held_out else "was in a plan that was skipped: its group"
            raise RefusedError(f"{ticket} {over} is over; discard it")
        tx.append("again", letter.row)
        self.discard(tx, ticket)
        return "task"

    def discard(self, tx: Transaction, ticket: str) -> None:
        """Forget a dead letter and its episode. Raises RefusedError: there is no such letter."""
        self._letter(tx, ticket)
        self._groups.remove_letter(tx, ticket)
        self._groups.forget(tx, ticket)

    def _letter(self, tx: Transaction, ticket: str) -> Letter:
        letter = Letter.load(tx, ticket)
        if letter is None:
            raise RefusedError(f"there is no dead letter {ticket}; `asyncrl replay dead-letters` lists them")
        return letter

    def _still_wanted(self, tx: Transaction, ticket: str, letter: Letter) -> bool:
        """Whether the episode is there and nobody has delivered its replacement yet."""
        group = Group.load(tx, letter.group)
        if group is None or not letter.scoring:
            return False
        replacement = group.ids(letter.group)[letter.member]
        return Facts.load(tx, replacement) is None and group.attempts[letter.member] == letter.attempt + 1

    def _reinstate(self, tx: Transaction, ticket: str, letter: Letter) -> None:
        group = Group.of(tx, letter.group)
        self._groups.withdraw(tx, group.ids(letter.group)[letter.member])
        group.attempts[letter.member] = letter.attempt
        group.save(tx, letter.group)
        facts = Facts.of(tx, ticket)
        facts.attempts = facts.leased = 0
        if group.training:
            tx.add(State.DEAD, -1)
        self._labelling.offer(tx, ticket, facts, group, urgent=True)


def letters(tx: Transaction) -> Sequence[tuple[str, Letter]]:
    """Every dead letter with its ticket, by ticket."""
    return [(key.decode(), Letter(*value)) for key, value in tx.items("dead")]
