"""Arbitrary interleavings of everything that can happen to the replay's core, against a tiny model of its promises."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.ids import is_evaluation
from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.sampling import Fifo, Filters, Freshest, Oldest, Prioritised
from asyncrl.replay.protocol import Leave
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord
from asyncrl.types import DEMONSTRATED, BatchPlan, Ticket
from tests.helpers import make_played, make_task
from tests.replay.support import Core, make_settings

pytestmark = pytest.mark.slow

SHOWN = [{"role": "assistant", "content": "1"}]
WORKERS = st.sampled_from(["a", "b"])
WAIT_S = 5.0
"""Less than a lease lasts, so that the wait for old groups often reaches its limit."""


class ReplayMachine(RuleBasedStateMachine):
    """The model knows only: which ids were acknowledged as stored, and which plans were handed out."""

    @initialize(
        options=st.fixed_dictionaries(
            {
                "sampler": st.sampled_from([Oldest(), Fifo(), Freshest(), Prioritised(0.5, 0.5)]),
                "spare_batches": st.sampled_from([None, 0.0, 0.5]),
                "wait_s": st.sampled_from([0.0, WAIT_S, None]),
                "masks_old": st.booleans(),
                "filters": st.builds(Filters, zero_variance=st.booleans()),
                "reissue_evicted": st.booleans(),
                "group_size": st.sampled_from([2, 4]),
                "max_attempts": st.integers(1, 2),
                "keep_steps": st.sampled_from([0, 1, math.inf]),
                "admission": st.builds(
                    Admission, st.integers(0, 2), st.just(4), st.integers(1, 2), st.sampled_from([1.0, 1.5])
                ),
            }
        ),
        kinds=st.sampled_from([("rules",), ("rules", "prm")]),
        demonstrated=st.sets(st.integers(0, 4)),
    )
    def start(self, options: dict[str, Any], kinds: tuple[str, ...], demonstrated: set[int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.admission, self.kinds = options["admission"], kinds
        options["masks_old"] &= self.admission.uses == 1
        self.widest = self.admission
        tasks = [make_task(index, demonstration=SHOWN if index in demonstrated else ()) for index in range(5)]
        self.demonstrated = {tasks[index].id for index in demonstrated}
        feed = Feed(tasks, seed=0, shuffle=True)
        self.settings = make_settings(**options, feed=feed, needs=lambda source: kinds)
        self.core = Core(Path(self.folder.name), self.settings)
        self.held: dict[str, list[Ticket]] = {"a": [], "b": []}
        self.leased: dict[str, list[str]] = {"a": [], "b": []}
        self.lives: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self.plans: list[tuple[str, ...]] = []
        self.bounds: list[int] = []
        self.version = 0

    @rule(worker=WORKERS, want=st.integers(0, 5))
    def take_tickets(self, worker: str, want: int) -> None:
        holding = [ticket.id for ticket in self.held[worker]]
        self.held[worker] += self.core.tickets(want, worker, holding, life=str(self.lives[worker]))

    @rule(worker=WORKERS)
    def lose_a_ticket_reply(self, worker: str) -> None:
        holding = [ticket.id for ticket in self.held[worker]]
        self.core.tickets(2, worker, holding, life=str(self.lives[worker]))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), age=st.integers(0, 3), twice=st.booleans())
    def finish_an_episode(self, data: st.DataObject, age: int, twice: bool) -> None:
        worker = data.draw(st.sampled_from([name for name, held in self.held.items() if held]))
        ticket = self.held[worker].pop(data.draw(st.integers(0, len(self.held[worker]) - 1)))
        oldest = max(ticket.min_version, self.version - age)
        newest = data.draw(st.integers(oldest, max(oldest, self.version)))
        versions = np.array([-1] * 4 + [oldest] * 3 + [newest], np.int32)
        trajectory = make_played(ticket, **({} if ticket.task.demonstration else {"versions": versions}))
        for _ in range(1 + twice):
            self.stored[ticket.id] += self.core.put(trajectory) == "stored"

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def fail_an_episode(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, held in self.held.items() if held]))
        self.core.fail(self.held[worker].pop().id)

    @rule(worker=WORKERS, count=st.integers(1, 4), data=st.data())
    def lease(self, worker: str, count: int, data: st.DataObject) -> None:
        serves = data.draw(st.sampled_from([self.kinds, self.kinds[:1], self.kinds[-1:]]))
        leased = self.core.lease(count, worker, serves=serves, life=str(self.lives[worker]))
        self.leased[worker] = [trajectory.id for trajectory in leased]

    @rule(worker=WORKERS, ok=st.booleans(), reward=st.sampled_from([0.0, 1.0]))
    def score_what_is_leased(self, worker: str, ok: bool, reward: float) -> None:
        for trajectory in self.leased[worker]:
            if ok:
                self.core.label(trajectory, reward, worker, str(self.lives[worker]))
            else:
                self.core.scoring_failed(trajectory, worker, str(self.lives[worker]))
        self.leased[worker] = []

    @rule()
    def train(self) -> None:
        self.train_plan(self.core.plan(len(self.plans)))

    @rule()
    def wait_and_train(self) -> None:
        plan = self.core.plan(len(self.plans))
        if plan is None and self.core.status()["depth_ready"] >= 4 // self.settings.group_size:
            # No rule lets more than 11 seconds pass, so no step has trained for longer.
            self.core.now += 11.0 if self.settings.wait_s is None else WAIT_S
            plan = self.core.plan(len(self.plans))
            assert plan is not None, "only old groups were waited for, and no longer than the limit"
        self.train_plan(plan)

    def train_plan(self, plan: BatchPlan | None) -> None:
        if plan is not None:
            self.check_trained_tokens(plan)
            self.plans.append(tuple(plan.ids))
            self.bounds.append(self.admission.max_lag)
            self.version += 1
            self.core.publish(self.version)

    def check_trained_tokens(self, plan: BatchPlan) -> None:
        trained: Counter[str] = Counter()
        for index, trajectory in enumerate(self.core.fetch(plan.ids)):
            first = plan.first_trained[index] if plan.first_trained else 0
            young = trajectory.versions[(trajectory.versions >= first) | (trajectory.versions == DEMONSTRATED)]
            assert len(young) == plan.trained_tokens[index]
            assert trajectory.is_demonstration or all(len(self.plans) - young <= self.admission.max_lag)
            trained[plan.group_ids[index]] += 0 if trajectory.is_demonstration else len(young)
        assert all(trained.values()), "a group without a young token was trained"

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        steps = data.draw(st.integers(0, len(self.plans)))
        self.core.checkpointed(steps, data.draw(st.integers(0, steps)))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.core.tick(seconds)

    @rule(data=st.data(), back=st.booleans())
    def settle_a_dead_letter(self, data: st.DataObject, back: bool) -> None:
        if names := sorted(self.core.dead_letters()):
            act = self.core.requeue if back else self.core.discard
            act(data.draw(st.sampled_from(names)))

    @rule(max_lag=st.none() | st.integers(0, 3))
    def kill_the_replay(self, max_lag: int | None) -> None:
        if max_lag is not None:
            self.admission = replace(self.admission, max_lag=max_lag)
            self.widest = max(self.widest, self.admission, key=lambda each: each.max_lag)
        self.core.restart(replace(self.settings, admission=self.admission))

    @rule(worker=WORKERS)
    def kill_an_actor(self, worker: str) -> None:
        self.held[worker] = []

    @rule(worker=WORKERS, twice=st.booleans())
    def leave_in_order(self, worker: str, twice: bool) -> None:
        """Leave as an actor and as a scorer of this name; the next one has another incarnation."""
        for _ in range(1 + twice):
            self.core.ask(Leave(worker, str(self.lives[worker])))
        assert self.core.tickets(1, worker, life=str(self.lives[worker])) == []
        self.held[worker], self.leased[worker] = [], []
        self.lives[worker] += 1

    @invariant()
    def nothing_is_stored_or_planned_twice(self) -> None:
        assert all(times <= 1 for times in self.stored.values())
        assert all(
            times <= self.admission.uses for times in Counter(name for plan in self.plans for name in plan).values()
        )

    @invariant()
    def plans_never_change_and_hold_whole_groups(self) -> None:
        for step, ids in enumerate(self.plans):
            plan = self.core.plan(step)
            assert plan is not None
            assert tuple(plan.ids) == ids
            shown = {ids[index] for index in plan.demonstrations}
            for name, size in Counter(plan.group_ids).items():
                members = [each for each, group in zip(ids, plan.group_ids, strict=True) if group == name]
                task = self.core.task(members[0])
                assert task is not None
                has_one = task.id in self.demonstrated
                assert size == self.settings.group_size + has_one
                assert shown & set(members) == set(members[self.settings.group_size :])

    @invariant()
    def nothing_is_lost_and_everything_is_counted(self) -> None:
        audit, status = self.core.audit(), self.core.status()
        assert (audit["lost"], audit["trained_twice"]) == (0, 0)
        assert sum(audit["states"].values()) == status["accepted"] == sum(self.stored.values())
        for end in ("trained", "evicted", "filtered", "dropped", "dead"):
            assert audit["states"].get(end, 0) == status[end]
            assert self.core.sampled_tokens(end) - self.core.masked_tokens(end) == status[f"tokens_{end}"]
        masked = sum(map(self.core.masked_tokens, ("planned", "trained")))
        assert masked == status["tokens_masked"] <= status["tokens_thrown_away"]

    @invariant()
    def each_episode_of_a_closed_group_is_counted_once(self) -> None:
        with self.core.store.transaction(write=False) as tx:
            parts = [cohorts.selection(tx).sampled]
            for key in [each.decode() for each in tx.keys("meta") if each.startswith(b"cohort/")]:
                cohort = tx.get("meta", key, cohorts.Cohort)
                assert cohort is not None
                parts += cohort.sums.values()
            opened = {name for name, _ in GroupRecord.all(tx)}
            records = [record for name, record in TrajectoryRecord.all(tx) if not is_evaluation(name)]
        closed = [each for each in records if each.group not in opened and not each.is_demonstration]
        assert sum(part.episodes for part in parts) == len(closed)
        assert sum(part.tokens for part in parts) == sum(each.sampled for each in closed)

    @invariant()
    def admission_holds_and_no_trained_token_is_too_old(self) -> None:
        assert 0 <= self.core.status()["committed"] <= self.widest.capacity(self.version)
        with self.core.store.transaction(write=False) as tx:
            for step, (ids, bound) in enumerate(zip(self.plans, self.bounds, strict=True)):
                assert all(TrajectoryRecord.of(tx, name).trained_lag_at(step) <= bound for name in ids)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.store.close()
            self.folder.cleanup()


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class LongReplayMachine(ReplayMachine):
    """The same, with many more orders of events."""


TestReplayForLong = pytest.mark.heavy(LongReplayMachine.TestCase)
TestReplayForLong.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
