"""Records the stages of episodes and groups in the replay as spans: held by an actor, waiting for a scorer, held by a
scorer, ready for a plan. A stage that began before a restart of the replay is not recorded."""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from asyncrl.observe.spans import Spans, Value
from asyncrl.replay.store.transaction import Transaction


class Stage(StrEnum):
    """The names of spans and of their tracks. The first three are stages of an episode, READY is a stage of a group."""

    TICKET = "ticket"
    QUEUED = "label queue"
    SCORING = "label"
    READY = "ready"


class Stages:
    """Records stages in `spans`, after the commit of the transaction that ends them."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._began: dict[tuple[Stage, str], float] = {}

    def begin(self, tx: Transaction, stage: Stage, name: str) -> None:
        """Note that an episode or a group enters a stage."""
        if self._spans.records:
            tx.afterwards(self._begin, stage, name)

    def end(self, tx: Transaction, stage: Stage, name: str, **values: Value) -> None:
        """Note that an episode or a group leaves a stage. The call has no effect if the stage was entered before the
        last restart, or was never entered."""
        if self._spans.records:
            tx.afterwards(partial(self._end, stage, name, **values))

    def forget(self, tx: Transaction, name: str) -> None:
        """Note that an episode is over. All of its stages end."""
        for stage in (Stage.TICKET, Stage.QUEUED, Stage.SCORING):
            self.end(tx, stage, name, outcome="ended")

    def mark(self, tx: Transaction, name: str, track: str, **values: Value) -> None:
        """Record an event as a span without a duration."""
        if self._spans.records:
            tx.afterwards(partial(self._mark, name, track, **values))

    def _begin(self, stage: Stage, name: str) -> None:
        self._began[stage, name] = self._spans.clock()

    def _end(self, stage: Stage, name: str, **values: Value) -> None:
        began = self._began.pop((stage, name), None)
        if began is not None:
            kind = "group" if stage is Stage.READY else "episode"
            self._spans.add(stage, began, self._spans.clock(), stage, **{kind: name}, **values)

    def _mark(self, name: str, track: str, **values: Value) -> None:
        now = self._spans.clock()
        self._spans.add(name, now, now, track, **values)
