"""Scores of whole groups: a group is leased, labelled and failed whole, no matter which process dies in between."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import RefusedError
from asyncrl.replay.labels.units import attempts
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord, TrajectoryState
from asyncrl.types import Purpose, Ticket
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import Core, make_settings

KINDS = ("rules", "manager")
SIZE, ATTEMPTS = 3, 2


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return make_core(tmp_path, ("manager",))


def make_core(folder: Path, kinds: tuple[str, ...]) -> Core:
    admission = Admission(max_lag=1, per_version=2 * SIZE)
    sizes = {"group_size": SIZE, "batch_size": 2 * SIZE, "max_attempts": ATTEMPTS}
    return Core(folder, make_settings(needs=lambda source: kinds, admission=admission, **sizes))


def lease_groups(core: Core, groups: int = 1, worker: str = "s", **options: Any) -> list[list[str]]:
    """The ids of the groups that a scorer gets, group by group."""
    found = defaultdict(list)
    for trajectory in core.lease(worker=worker, serves=["manager"], groups=groups, **options):
        found[trajectory.group_id].append(trajectory.id)
    return list(found.values())


def test_a_group_is_leased_once_all_its_members_are_there(core: Core) -> None:
    tickets = core.tickets(SIZE)
    core.deliver(tickets[:-1])
    assert lease_groups(core) == []
    assert core.status()["depth_waiting"] == 0
    core.deliver(tickets[-1:])
    assert core.status()["depth_waiting"] == SIZE
    assert lease_groups(core) == [[ticket.id for ticket in tickets]]
    assert lease_groups(core, worker="t") == []


def test_members_pass_their_earlier_kinds_one_by_one(tmp_path: Path) -> None:
    core = make_core(tmp_path, KINDS)
    ids = core.deliver(core.tickets(SIZE))
    first, *rest = core.lease(serves=KINDS)
    core.label(first.id, 0.25)
    assert lease_groups(core) == []
    # Asking again gave back what was not labelled.
    for trajectory in core.lease(serves=["rules"]):
        core.label(trajectory.id, 0.25)
    assert len(rest) == SIZE - 1
    assert [[each.kinds, each.final, each.partial] for each in core.leased(serves=KINDS).body] == [
        [("manager",), True, True]
    ] * SIZE
    core.label_group(ids)
    assert (core.status()["labelled"], core.status()["depth_ready"]) == (SIZE, 1)


def test_a_lease_has_as_many_groups_as_it_asked_for_and_names_each_task_once(core: Core) -> None:
    core.deliver(core.tickets(4 * SIZE))
    reply = core.leased(serves=["manager"], groups=2)
    assert [each.task is not None for each in reply.body] == [True, False, False] * 2


def test_the_labels_of_a_group_are_taken_whole_or_not_at_all(core: Core) -> None:
    core.deliver(core.tickets(SIZE))
    ((*ids,),) = lease_groups(core)
    for wrong in (ids[:-1], [*ids[:-1], "t000000009.0.0"], ids[::-1], [*ids, ids[0]]):
        with pytest.raises(RefusedError, match="do not match the leased group"):
            core.label_group(wrong)
    with pytest.raises(RefusedError, match="labels at once"):
        core.label(ids[0])
    with pytest.raises(RefusedError, match="no labels came"):
        core.label_group([])
    assert core.status()["labelled"] == 0
    core.label_group(ids)
    core.label_group(ids)
    status = core.status()
    assert (status["labelled"], status["late_labels"]) == (SIZE, SIZE)


def test_a_failure_of_the_manager_is_one_attempt_of_every_member_and_at_last_all_are_replaced(core: Core) -> None:
    ids = core.deliver(core.tickets(SIZE))
    for _ in range(ATTEMPTS):
        assert lease_groups(core) == [ids]
        core.scoring_failed(ids[1])
    status = core.status()
    assert (status["scoring_failures"], status["dead"], status["depth_dead"]) == (ATTEMPTS * SIZE, SIZE, SIZE)
    assert all("nonsense" in dead.reason for dead in core.dead_letters().values())
    replacements = core.deliver(core.tickets(SIZE))
    assert [name.rsplit(".", 1)[0] for name in replacements] == [name.rsplit(".", 1)[0] for name in ids]
    assert lease_groups(core) == [replacements]
    for _ in range(ATTEMPTS):
        lease_groups(core)
        core.scoring_failed(replacements[0])
    status = core.status()
    # The last attempt of one member drops its group, and the others with it.
    assert (status["depth_groups"], status["dropped"], status["dead"]) == (0, SIZE - 1, SIZE + 1)
    assert core.audit()["lost"] == 0


def test_a_group_whose_scorer_died_is_leased_whole_again_and_alone(core: Core) -> None:
    ids = core.deliver(core.tickets(2 * SIZE))
    dead, other = ids[:SIZE], ids[SIZE:]
    assert lease_groups(core) == [dead]
    core.tick(11)
    assert lease_groups(core, groups=2, worker="t") == [dead]
    core.label_group(dead, worker="s")
    assert (core.status()["late_labels"], core.status()["labelled"]) == (SIZE, 0)
    core.label_group(dead, worker="t")
    assert lease_groups(core, groups=2, worker="t") == [other]
    assert core.status()["labelled"] == SIZE


def test_a_group_that_kills_its_scorers_takes_no_other_along(core: Core) -> None:
    ids = core.deliver(core.tickets(2 * SIZE))
    killer, other = ids[:SIZE], ids[SIZE:]
    for life in range(10):
        for group in lease_groups(core, groups=2, life=str(life)):
            if killer not in (group, *lease_groups(core, worker="nobody")):
                core.label_group(group, life=str(life))
    status = core.status()
    assert (status["dead"], status["labelled"]) == (SIZE, len(other))


def test_a_member_whose_data_is_damaged_is_replaced_while_the_others_wait(core: Core) -> None:
    ids = core.deliver(core.tickets(SIZE))
    with core.store.transaction() as tx:
        tx.delete("data", ids[0])
    assert lease_groups(core) == []
    (replacement,) = core.deliver(core.tickets(1))
    assert lease_groups(core) == [[replacement, *ids[1:]]]
    assert (core.status()["dead"], core.status()["damaged"]) == (1, 1)


def test_a_restarted_replay_knows_the_groups_that_wait_and_that_are_leased(core: Core) -> None:
    ids = core.deliver(core.tickets(2 * SIZE))
    assert lease_groups(core) == [ids[:SIZE]]
    core.restart()
    assert lease_groups(core, worker="t", groups=9) == [ids[SIZE:]]
    core.label_group(ids[:SIZE])
    core.label_group(ids[SIZE:], worker="t")
    assert core.status()["labelled"] == 2 * SIZE


def test_held_out_tasks_are_groups_of_one(core: Core) -> None:
    core.evaluate(0)
    core.deliver(ticket for ticket in core.tickets(6) if ticket.purpose is Purpose.EVAL)
    groups = lease_groups(core, groups=9)
    assert [len(group) for group in groups] == [1, 1, 1]
    for group in groups:
        core.label_group(group)
    assert core.evaluation(0)["count"] == 3


WORKERS = st.sampled_from(["s", "t"])


class GroupMachine(RuleBasedStateMachine):
    """Scorers that die, are slow or fail, and a replay that is killed. Each call of a manager gives all members a
    reward of its own, so that labels of two calls never mix unseen."""

    @initialize(kinds=st.sampled_from([("manager",), KINDS]))
    def start(self, kinds: tuple[str, ...]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.core, self.kinds = make_core(Path(self.folder.name), kinds), kinds
        self.held: list[Ticket] = []
        self.lives = {"s": 0, "t": 0}
        self.leased: dict[str, list[list[str]]] = {"s": [], "t": []}
        self.lost: list[tuple[str, int, list[str]]] = []
        self.calls = count(1)
        self.steps = 0

    @rule(want=st.integers(1, 5))
    def take_tickets(self, want: int) -> None:
        self.held += self.core.tickets(want, holding=[ticket.id for ticket in self.held])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ended=st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=6))
    def end_episodes(self, data: st.DataObject, ended: list[bool]) -> None:
        for ok in ended[: len(self.held)]:
            ticket = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            if ok:
                self.core.put(make_trajectory(ticket, ticket.min_version))
            else:
                self.core.fail(ticket.id)

    @rule(worker=WORKERS, serves=st.sampled_from([KINDS, KINDS[:1], KINDS[1:]]), groups=st.integers(1, 3))
    def lease(self, worker: str, serves: Sequence[str], groups: int) -> None:
        life = str(self.lives[worker])
        reply = self.core.leased(4, worker, serves=serves, life=life, groups=groups)
        trajectories = self.core.leased_trajectories(reply)
        self._abandon(worker)
        units: dict[str, list[str]] = defaultdict(list)
        for task, trajectory in zip(reply.body, trajectories, strict=True):
            units[trajectory.group_id if task.kinds == ("manager",) else trajectory.id].append(trajectory.id)
        for name, unit in units.items():
            assert [each.rsplit(".", 2)[1] for each in unit] == list("012") or name == unit[0]
        assert len(units) <= max(groups, 4)
        self.leased[worker] = list(units.values())

    def _abandon(self, worker: str) -> None:
        self.lost += [(worker, self.lives[worker], unit) for unit in self.leased[worker]]
        self.leased[worker] = []

    @precondition(lambda self: any(self.leased.values()))
    @rule(data=st.data(), ok=st.booleans() | st.just(True))
    def score(self, data: st.DataObject, ok: bool) -> None:
        worker = data.draw(st.sampled_from([name for name, units in self.leased.items() if units]))
        unit = self.leased[worker].pop(0)
        if ok:
            self._deliver(worker, self.lives[worker], unit)
        else:
            self.core.scoring_failed(data.draw(st.sampled_from(unit)), worker, str(self.lives[worker]))

    def _deliver(self, worker: str, life: int, unit: Sequence[str]) -> None:
        labels = [make_labels(name, float(call)) for call in [next(self.calls)] for name in unit]
        if len(unit) == SIZE:
            self.core.put_group_labels(labels, worker, str(life))
        else:
            self.core.put_labels(labels[0], worker, str(life))

    @rule(worker=WORKERS)
    def kill_a_scorer(self, worker: str) -> None:
        self._abandon(worker)
        self.lives[worker] += 1

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def deliver_what_was_lost(self, data: st.DataObject) -> None:
        """Deliver the labels of a call after its scorer was taken for dead. They count only if the replay has neither
        dropped the unit, nor given it to another scorer or to this scorer's next start."""
        worker, life, unit = self.lost.pop(data.draw(st.integers(0, len(self.lost) - 1)))
        if life == self.lives[worker] and unit in self.leased[worker]:
            return
        with self.core.store.transaction(write=False) as tx:
            held = tx.get("scorers", worker, str) == str(life)
            held &= set(unit) <= set(tx.members("leased", worker))
            held &= all(TrajectoryRecord.of(tx, name).state is TrajectoryState.LEASED for name in unit)
        before = self.core.status()["late_labels"]
        if held and len(unit) < SIZE and any(set(unit) < set(each) for each in self.leased[worker]):
            # It has the same trajectory with its group now: what it says of it alone changes nothing.
            with pytest.raises(RefusedError, match="leased with its group"):
                self._deliver(worker, life, unit)
            return
        self._deliver(worker, life, unit)
        assert self.core.status()["late_labels"] == before + (0 if held else len(unit))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.core.tick(seconds)

    @rule()
    def train(self) -> None:
        if self.core.plan(self.steps) is not None:
            self.steps += 1
            self.core.publish(self.steps)

    @rule(data=st.data(), back=st.booleans())
    def settle_a_dead_letter(self, data: st.DataObject, back: bool) -> None:
        if names := sorted(self.core.dead_letters()):
            act = self.core.requeue if back else self.core.discard
            act(data.draw(st.sampled_from(names)))

    @rule()
    def kill_the_replay(self) -> None:
        self.core.restart()

    @invariant()
    def groups_are_whole_wherever_they_are(self) -> None:
        with self.core.store.transaction(write=False) as tx:
            queued = {name for _, name in tx.items("waiting", str)}
            holder = {name: worker for worker in tx.holders("leased") for name in tx.members("leased", worker)}
            leased = {name for name, each in TrajectoryRecord.all(tx) if each.state is TrajectoryState.LEASED}
            # A scorer also holds what was dropped meanwhile, until it labels it or asks for more.
            assert leased <= holder.keys()
            for name, group in GroupRecord.all(tx):
                found = [(each, TrajectoryRecord.load(tx, each)) for each in group.ids(name)]
                if any(each is None or each.scored < len(self.kinds) - 1 for _, each in found):
                    continue
                states = {each.state for _, each in found if each is not None}
                # All earlier scores are there: the whole group waits, is leased by one scorer, or is labelled.
                assert len(states) == 1
                if TrajectoryState.WAITING in states:
                    assert name in queued
                elif TrajectoryState.LEASED in states:
                    assert len({holder[each] for each, _ in found}) == 1
                else:
                    assert len({each.reward for _, each in found if each is not None}) == 1

    @invariant()
    def nothing_is_lost_and_everything_is_counted(self) -> None:
        audit, status = self.core.audit(), self.core.status()
        assert (audit["lost"], audit["trained_twice"]) == (0, 0)
        assert sum(audit["states"].values()) == status["accepted"]
        for end in ("trained", "evicted", "filtered", "dropped", "dead"):
            assert audit["states"].get(end, 0) == status[end]
            assert self.core.sampled_tokens(end) == status[f"tokens_{end}"]

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.store.close()
            self.folder.cleanup()


TestGroups = pytest.mark.slow(GroupMachine.TestCase)
TestGroups.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


class LongGroupMachine(GroupMachine):
    """The same, with many more orders of events."""


TestGroupsForLong = pytest.mark.heavy(LongGroupMachine.TestCase)
TestGroupsForLong.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def test_a_group_was_leased_as_often_as_the_member_that_was_leased_most_often() -> None:
    members = [TrajectoryRecord("g", member, 4, 2, 0, attempts=count) for member, count in enumerate((2, 0))]
    assert attempts([(f"t{record.member}", record) for record in members]) == 2
    assert attempts([]) == 0
