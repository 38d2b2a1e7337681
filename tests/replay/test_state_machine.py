"""Arbitrary interleavings of everything that can happen to the replay's core, against a tiny model of its promises."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.replay.admission import Admission
from asyncrl.types import Ticket
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_rules

WORKERS = st.sampled_from(["a", "b"])


class ReplayMachine(RuleBasedStateMachine):
    """The model knows only: which ids were acknowledged as stored, and which plans were handed out."""

    @initialize(max_lag=st.integers(0, 2))
    def start(self, max_lag: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.max_lag = max_lag
        self.core = Core(Path(self.folder.name), make_rules(admission=Admission(max_lag, 4)))
        self.held: dict[str, list[Ticket]] = {"a": [], "b": []}
        self.leased: dict[str, list[str]] = {"a": [], "b": []}
        self.stored: Counter[str] = Counter()
        self.plans: list[tuple[str, ...]] = []
        self.version = 0

    @rule(worker=WORKERS, want=st.integers(0, 5))
    def take_tickets(self, worker: str, want: int) -> None:
        holding = [ticket.id for ticket in self.held[worker]]
        self.held[worker] += self.core.tickets(want, worker, holding)

    @rule(worker=WORKERS)
    def lose_a_ticket_reply(self, worker: str) -> None:
        self.core.tickets(2, worker, [ticket.id for ticket in self.held[worker]])

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), age=st.integers(0, 3), twice=st.booleans())
    def finish_an_episode(self, data: st.DataObject, age: int, twice: bool) -> None:
        worker = data.draw(st.sampled_from([name for name, held in self.held.items() if held]))
        ticket = self.held[worker].pop(data.draw(st.integers(0, len(self.held[worker]) - 1)))
        trajectory = make_trajectory(ticket, max(ticket.min_version, self.version - age))
        for _ in range(1 + twice):
            self.stored[ticket.id] += self.core.put(trajectory) == "stored"

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def fail_an_episode(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, held in self.held.items() if held]))
        self.core.fail(self.held[worker].pop().id)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def lease(self, worker: str, count: int) -> None:
        self.leased[worker] = [trajectory.id for trajectory in self.core.lease(count, worker)]

    @rule(worker=WORKERS, ok=st.booleans())
    def score_what_is_leased(self, worker: str, ok: bool) -> None:
        for trajectory in self.leased[worker]:
            if ok:
                self.core.label(trajectory, worker=worker)
            else:
                self.core.scoring_failed(trajectory, worker=worker)
        self.leased[worker] = []

    @rule()
    def train(self) -> None:
        plan = self.core.plan(len(self.plans))
        if plan is not None:
            self.plans.append(tuple(plan.ids))
            self.version += 1
            self.core.publish(self.version)

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        self.core.checkpointed(data.draw(st.integers(0, len(self.plans))))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.core.tick(seconds)

    @rule()
    def kill_the_replay(self) -> None:
        self.core.restart()

    @rule(worker=WORKERS)
    def kill_an_actor(self, worker: str) -> None:
        self.held[worker] = []

    @invariant()
    def nothing_is_stored_or_planned_twice(self) -> None:
        if not hasattr(self, "core"):
            return
        assert all(times <= 1 for times in self.stored.values())
        assert all(times == 1 for times in Counter(name for plan in self.plans for name in plan).values())

    @invariant()
    def plans_never_change_and_hold_whole_groups(self) -> None:
        if not hasattr(self, "core"):
            return
        for step, ids in enumerate(self.plans):
            plan = self.core.plan(step)
            assert plan is not None
            assert tuple(plan.ids) == ids
            assert set(Counter(plan.group_ids).values()) == {2}

    @invariant()
    def nothing_is_lost_and_everything_is_counted(self) -> None:
        if not hasattr(self, "core"):
            return
        audit, status = self.core.audit(), self.core.status()
        assert (audit["lost"], audit["trained_twice"]) == (0, 0)
        assert sum(audit["states"].values()) == status["accepted"] == sum(self.stored.values())
        for end in ("trained", "evicted", "dropped", "dead"):
            assert audit["states"].get(end, 0) == status[end]

    @invariant()
    def admission_holds_and_no_trained_token_is_too_old(self) -> None:
        if not hasattr(self, "core"):
            return
        assert 0 <= self.core.status()["committed"] <= (self.max_lag + self.version + 1) * 4
        with self.core.store.transaction(write=False) as tx:
            for step, ids in enumerate(self.plans):
                assert all(step - tx.get("facts", name)[4] <= self.max_lag for name in ids)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.store.close()
            self.folder.cleanup()


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
