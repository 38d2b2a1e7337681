"""A step waits for running groups that it would make too old: nothing is thrown away, and the learner always goes
on."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.replay.batches.sampling import Filters, Oldest
from asyncrl.replay.protocol import PlanAtOnce
from asyncrl.replay.starts.admission import Admission
from asyncrl.types import Ticket
from tests.helpers import make_played
from tests.replay.support import Core, make_settings

BATCH, GROUP = 4, 2
FOREVER = 1e9


def waiting(folder: Path, max_lag: int = 1, wait_s: float | None = FOREVER, **changes: Any) -> Core:
    options = {"admission": Admission(max_lag, BATCH), "sampler": Oldest(), "wait_s": wait_s, **changes}
    return Core(folder, make_settings(**options))


def play(core: Core, tickets: list[Ticket]) -> None:
    core.deliver(tickets, version=core.status()["version"])
    core.label_all()


def step_with_a_straggler(core: Core) -> list[Ticket]:
    """Step 0 is trained, and a group of version 0 still runs. Two groups of version 1 are complete, too. Returns the
    tickets of the running group."""
    tickets = core.tickets(8)
    straggler = tickets[2:4]
    play(core, tickets[:2] + tickets[4:])
    assert core.plan(0) is not None
    core.publish(1)
    play(core, core.tickets(4, holding=[each.id for each in straggler]))
    return straggler


def test_a_step_waits_for_a_running_group_that_it_would_make_too_old(tmp_path: Path) -> None:
    core = waiting(tmp_path)
    straggler = step_with_a_straggler(core)
    assert core.plan(1) is None
    assert core.plan_ahead(1) is None
    core.deliver(straggler)
    core.label_all()
    plan = core.plan(1)
    assert plan is not None
    assert {each.group_id for each in straggler} <= set(plan.group_ids)
    assert core.status()["evicted"] == 0


def test_without_the_wait_the_group_is_thrown_away(tmp_path: Path) -> None:
    core = waiting(tmp_path, wait_s=0)
    straggler = step_with_a_straggler(core)
    assert core.plan(1) is not None
    core.publish(2)
    core.deliver(straggler)
    core.label_all()
    core.plan(2)
    assert core.status()["evicted"] == GROUP


def test_a_group_that_waits_for_its_labels_is_unfinished(tmp_path: Path) -> None:
    core = waiting(tmp_path)
    core.deliver(step_with_a_straggler(core))
    assert core.plan(1) is None
    core.label_all()
    assert core.plan(1) is not None


def test_after_its_limit_the_step_is_planned_and_the_same_groups_are_not_waited_for_again(tmp_path: Path) -> None:
    core = waiting(tmp_path, max_lag=2, wait_s=60.0)
    tickets = core.tickets(12)
    hung = tickets[:4]
    play(core, tickets[4:])
    assert core.plan(0) is not None
    core.publish(1)
    play(core, core.tickets(4, holding=[each.id for each in hung]))
    assert core.plan(1) is not None, "step 2 has room for the two groups that still run"
    core.publish(2)
    play(core, core.tickets(4, holding=[each.id for each in hung]))
    assert core.plan(2) is None
    core.now += 59.0
    assert core.plan(2) is None
    core.now += 1.0
    assert core.plan(2) is not None
    assert core.status()["wait_limits_reached"] == 1
    core.publish(3)
    play(core, core.tickets(4, holding=[each.id for each in hung]))
    assert core.plan(3) is not None, "these groups are given up"
    assert core.status()["wait_limits_reached"] == 1


def with_stragglers_at_step_4(folder: Path) -> Core:
    """A replay whose learner trained steps 0 to 3 in 300, 5, 7 and 90 s, and that waits for old groups before step 4.
    Before each step the learner waited for episodes for 20 s."""
    core = waiting(folder, wait_s=None)
    for step, trains_s in enumerate((300.0, 5.0, 7.0, 90.0)):
        core.plan(step)
        if step < 3:
            play(core, core.tickets(4 if step else 8))
        else:
            core.tickets(4)
        core.now += 20.0
        # With several shards the learner requests the plan again until each shard has one.
        assert core.plan(step) == core.plan(step) is not None
        core.now += trains_s
        core.publish(step + 1)
    play(core, core.tickets(4, holding=core.holding()))
    return core


def test_without_a_limit_in_seconds_a_step_waits_as_long_as_the_learner_trained_its_last_steps(tmp_path: Path) -> None:
    core = with_stragglers_at_step_4(tmp_path)
    assert core.plan(4) is None
    core.now += 6.9
    assert core.plan(4) is None
    core.now += 0.2
    assert core.plan(4) is not None, "the median of 5, 7 and 90 is 7, and the first step does not count"
    assert core.status()["wait_limits_reached"] == 1


def test_a_learner_that_was_away_begins_its_wait_again(tmp_path: Path) -> None:
    core = with_stragglers_at_step_4(tmp_path)
    assert core.plan(4) is None
    core.now += 600.0
    core.tickets(0, holding=core.holding())
    assert core.plan(4) is None
    core.now += 7.1
    assert core.plan(4) is not None


def test_a_learner_that_resumes_at_an_earlier_step_counts_no_time_of_its_absence(tmp_path: Path) -> None:
    core = with_stragglers_at_step_4(tmp_path)
    core.now += 600.0
    for step in (2, 3):
        assert core.plan(step) is not None
        core.now += 8.0
    assert core.plan(4) is None
    core.now += 7.1
    assert core.plan(4) is not None, "the median of 5, 7, 90 is still 7: step 2 was the first of the new learner"


def test_without_a_limit_in_seconds_no_step_waits_before_the_time_of_a_step_is_known(tmp_path: Path) -> None:
    core = waiting(tmp_path, wait_s=None)
    step_with_a_straggler(core)
    core.restart()
    assert core.plan(1) is not None
    assert core.status()["wait_limits_reached"] == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_groups_that_were_given_up_are_not_waited_for_at_a_later_step_of_the_same_version(
    tmp_path: Path, restarts: bool
) -> None:
    core = waiting(tmp_path, wait_s=60.0, admission=Admission(1, 2 * BATCH), publish_every=2)
    tickets = core.tickets(16)
    hung, holding = tickets[:6], [each.id for each in tickets[:6]]
    play(core, tickets[6:])
    assert core.plan(0) is not None
    assert core.plan(1) is not None
    core.publish(1)
    play(core, core.tickets(8, holding=holding))
    assert core.plan(2) is None, "steps 2 and 3 have no room for the 3 groups that still run, and for others"
    core.now += 60.0
    assert core.plan(2) is not None
    if restarts:
        core.restart()
    core.tickets(0, holding=holding)
    assert core.plan(3) is not None
    assert core.status()["wait_limits_reached"] == 1
    core.deliver(hung)
    core.label_all()
    assert core.status()["evicted"] == 0, "they may still be trained if they end in time"


def test_a_batch_that_is_fetched_ahead_waits_without_using_up_the_limit(tmp_path: Path) -> None:
    core = waiting(tmp_path, wait_s=60.0)
    step_with_a_straggler(core)
    for _ in range(9):
        core.tick(9.0)
        core.tickets(0, holding=core.holding())
        assert core.plan_ahead(1) is None
    assert core.plan(1) is None
    core.now += 60.0
    assert core.plan(1) is not None


def test_tickets_that_no_actor_holds_are_not_old(tmp_path: Path) -> None:
    """The actor is lost. Once its lease ends, its episodes must begin again, and then have newer tokens."""
    core = waiting(tmp_path)
    straggler = step_with_a_straggler(core)
    assert core.plan(1) is None
    core.tick(11.0)
    assert core.plan(1) is not None
    core.publish(2)
    again = core.tickets(4, worker="b")
    assert [each.id for each in again[:2]] == [each.id for each in straggler], "members of old groups come first"
    assert all(each.min_version == 2 for each in again)


def test_a_group_is_as_old_as_its_finished_members(tmp_path: Path) -> None:
    """One member is stored, and another one fails: its new attempt has newer tokens, but the group does not."""
    core = waiting(tmp_path)
    first, second = step_with_a_straggler(core)
    core.deliver([first])
    core.fail(second.id)
    assert core.plan(1) is None
    (retry,) = core.tickets(1)
    assert (retry.group_id, retry.min_version) == (second.group_id, 1)
    core.deliver([retry], version=1)
    core.label_all()
    assert core.plan(1) is not None


def test_a_ticket_asks_for_the_version_at_which_it_is_given_out(tmp_path: Path) -> None:
    """A wait with a limit of its own loses no group. So an episode starts with no older version, even if that is young
    enough by the forecast of when its group is trained."""

    def oldest_of_next(folder: Path, wait_s: float | None) -> set[int]:
        core = waiting(folder, wait_s=wait_s, admission=Admission(2, 100 * BATCH))
        core.deliver(core.tickets(4))
        core.publish(1)
        return {each.min_version for each in core.tickets(4)}

    assert oldest_of_next(tmp_path / "waits", FOREVER) == {1}
    assert oldest_of_next(tmp_path / "waits a step", None) == {0}
    assert oldest_of_next(tmp_path / "does not", 0) == {0}


def at_step_2(folder: Path, idle_s: float) -> tuple[Core, list[Ticket]]:
    """Before step 2, for which a full batch is complete. For each earlier step the learner first lacked a batch for
    `idle_s` seconds, and then trained for 10 s. Also returns the tickets of a running group, which was opened at
    version 1, but names version 0. Step 3 may not train version 0."""
    core = Core(folder, make_settings(admission=Admission(2, BATCH), sampler=Oldest(), wait_s=None), lease_s=FOREVER)
    straggler: list[Ticket] = []
    for step in range(2):
        assert core.plan(step) is None
        core.now += idle_s
        play(core, core.tickets(4, holding=[each.id for each in straggler]))
        assert core.plan(step) is not None
        core.now += 10.0
        core.publish(step + 1)
        straggler = straggler or core.tickets(2)
    assert {each.min_version for each in straggler} == {0}
    play(core, core.tickets(4, holding=[each.id for each in straggler]))
    return core, straggler


def test_a_step_waits_for_a_group_whose_ticket_names_an_older_version_than_the_newest(tmp_path: Path) -> None:
    core, straggler = at_step_2(tmp_path, idle_s=1.0)
    assert core.plan(2) is None
    core.deliver(straggler, version=0)
    core.label_all()
    plan = core.plan(2)
    assert plan is not None
    assert {each.group_id for each in straggler} <= set(plan.group_ids)


@pytest.mark.parametrize(("idle_s", "limit_s"), [(0.0, 0.0), (1.0, 3.0), (2.0, 6.0), (100.0, 10.0)])
def test_a_default_wait_is_in_proportion_to_the_time_for_which_the_learner_lacks_a_batch(
    idle_s: float, limit_s: float, tmp_path: Path
) -> None:
    """Each wait slows down a run whose engines are faster than its learner. No wait is longer than the training."""
    core, _ = at_step_2(tmp_path, idle_s)
    waited_s = 0.0
    while core.plan(2) is None:
        core.now += 0.5
        waited_s += 0.5
    # The full batch of step 2 counts as time without a lack.
    assert limit_s * 2 / 3 <= waited_s <= limit_s


@pytest.mark.parametrize("empty", [0, 3])
def test_steps_that_take_nothing_of_a_shard_let_in_no_further_episodes(empty: int, tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(2, BATCH), sampler=Oldest()), lease_s=FOREVER)
    for step in range(5):
        if step < empty:
            assert core.ask(PlanAtOnce(step)).ids == []
        else:
            core.run_episodes(BATCH, version=step)
            assert core.plan(step) is not None
        core.publish(step + 1)
    held: list[str] = []
    while more := core.tickets(8, holding=held):
        held += [each.id for each in more]
    assert len(held) == 3 * BATCH


def test_the_wait_is_no_reason_to_start_more_or_fewer_episodes(tmp_path: Path) -> None:
    core = waiting(tmp_path, spare_batches=0.0)
    straggler = step_with_a_straggler(core)
    before = core.status()["ahead"]
    assert core.plan(1) is None
    core.now += 100.0
    assert core.plan(1) is None
    assert core.status()["ahead"] == before
    play(core, straggler)
    assert core.plan(1) is not None
    assert core.status()["ahead"] == before


def test_the_status_says_for_which_groups_the_learner_waits_and_how_long(tmp_path: Path) -> None:
    core = waiting(tmp_path, wait_s=60.0)
    straggler = step_with_a_straggler(core)
    assert core.status()["old_groups"] == ""
    assert core.plan(1) is None
    core.tick(4.0)
    assert core.status()["old_groups"].startswith(
        "waits for the oldest group, begun at version 0, for 4 s of at most 60 s"
    )
    assert core.status()["learner_waited_for_old_groups_s"] == 4.0
    play(core, straggler)
    assert core.plan(1) is not None
    assert core.status()["old_groups"] == ""
    assert core.status()["learner_waited_for_episodes_s"] == 0.0


def test_a_full_store_takes_no_old_group_so_nothing_waits_for_it(tmp_path: Path) -> None:
    core = waiting(tmp_path)
    step_with_a_straggler(core)
    core.restart(
        make_settings(admission=Admission(1, BATCH), sampler=Oldest(), wait_s=FOREVER, full_bytes=0, high_water_bytes=1)
    )
    assert core.plan(1) is not None


def test_a_shard_that_must_have_a_plan_at_once_does_not_wait(tmp_path: Path) -> None:
    core = waiting(tmp_path)
    step_with_a_straggler(core)
    assert len(core.ask(PlanAtOnce(1)).ids) == BATCH


def test_a_synchronous_run_never_waits_for_old_groups(tmp_path: Path) -> None:
    """All episodes of a batch have the version of their step."""
    core = waiting(tmp_path, max_lag=0, admission=Admission(0, BATCH, oversample=2.0))
    tickets = core.tickets(8)
    play(core, tickets[:4])
    assert core.plan(0) is not None
    core.publish(1)
    more = core.tickets(8, holding=[each.id for each in tickets[4:]])
    play(core, more)
    assert core.plan(1) is not None


class RandomRun:
    """A run whose episodes take arbitrary time, fail at times, and are sampled by the oldest version that their ticket
    allows."""

    def __init__(self, core: Core, dice: random.Random, publish_every: int) -> None:
        self.core, self.dice, self.publish_every = core, dice, publish_every
        self.running: list[Ticket] = []
        self.step = 0

    def finish(self, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            # Most often a young episode, so that the oldest ones become stragglers.
            last = len(self.running) - 1
            ticket = self.running.pop(max(self.dice.randint(0, last), self.dice.randint(0, last)))
            if self.dice.random() < 0.1:
                self.core.fail(ticket.id)
            else:
                self.core.put(make_played(ticket, ticket.min_version))
        for trajectory in self.core.lease():
            self.core.label(trajectory.id, float(self.dice.random() < 0.7))

    def start(self, count: int) -> None:
        self.running += self.core.tickets(count, holding=[each.id for each in self.running])

    def train(self) -> bool:
        plan = self.core.plan_ahead(self.step) if self.dice.random() < 0.2 else self.core.plan(self.step)
        if plan is None:
            return False
        self.step += 1
        if self.step % self.publish_every == 0:
            self.core.publish(self.step // self.publish_every)
        return True


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 0.0, 0.5]),
    st.booleans(),
)
def test_no_group_becomes_too_old_and_the_learner_always_gets_its_next_batch(
    seed: int, max_lag: int, publish_every: int, spare_batches: float | None, zero_variance: bool
) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        core = waiting(
            Path(folder),
            admission=Admission(max_lag, BATCH * publish_every),
            publish_every=publish_every,
            spare_batches=spare_batches,
            filters=Filters(zero_variance=zero_variance),
            max_attempts=3,
        )
        run = RandomRun(core, dice, publish_every)
        for _ in range(40):
            run.start(dice.randint(0, 6))
            run.finish(dice.randint(0, 4))
            run.train()
            if dice.random() < 0.05:
                core.restart()
        before = run.step
        for _ in range(200):
            if run.train():
                break
            core.now += 100.0
            run.start(100)
            run.finish(100)
        assert run.step > before
        status = core.status()
        assert (status["evicted"], status["wait_limits_reached"]) == (0, 0)
        assert core.audit()["largest_lag"] <= max_lag
        core.store.close()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_a_step_trains_groups_for_which_it_has_waited_so_that_also_the_last_step_gains_by_it(
    seed: int, max_lag: int
) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        core = waiting(Path(folder), max_lag)
        running: list[Ticket] = []
        for step in range(6):
            unfinished: set[str] = set()
            while (plan := core.plan(step)) is None:
                if core.status()["old_groups"] and not unfinished:
                    unfinished = {each.group_id for each in running}
                running += core.tickets(100, holding=[each.id for each in running])
                # Most often a young episode ends, so that the oldest ones become stragglers.
                last = len(running) - 1
                ended = running.pop(max(dice.randint(0, last), dice.randint(0, last), dice.randint(0, last)))
                core.deliver([ended], version=ended.min_version)
                core.label_all()
            assert not unfinished or unfinished & set(plan.group_ids)
            core.publish(step + 1)
        core.store.close()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_a_hung_actor_delays_each_step_by_at_most_the_limit(seed: int, max_lag: int) -> None:
    """The episodes of the hung actor never end, but it renews its lease."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        core = waiting(Path(folder), max_lag, wait_s=5.0)
        hung = [each.id for each in core.tickets(dice.randint(1, 4), worker="hung")]
        run = RandomRun(core, dice, 1)
        for _ in range(10):
            core.tickets(0, worker="hung", holding=hung)
            while core.status()["depth_ready"] < BATCH // GROUP:
                run.start(100)
                if not run.running:
                    break
                run.finish(100)
            if core.plan(run.step) is None:
                core.now += 5.0
            assert core.plan(run.step) is not None or core.status()["depth_ready"] < BATCH // GROUP
            run.step += core.plan(run.step) is not None
            core.publish(run.step)
        assert run.step > max_lag
        assert core.status()["wait_limits_reached"] <= max_lag + 1
        core.store.close()


@pytest.mark.parametrize("lowered", [0, 1])
def test_a_run_that_resumes_with_a_smaller_age_bound_does_not_wait_for_hopeless_groups(
    tmp_path: Path, lowered: int
) -> None:
    core = waiting(tmp_path, max_lag=3)
    tickets = core.tickets(16)
    hung = tickets[:2]
    play(core, tickets[2:])
    for step in range(2):
        assert core.plan(step) is not None
        core.publish(step + 1)
        play(core, core.tickets(4, holding=[each.id for each in hung]))
    core.restart(make_settings(admission=Admission(lowered, BATCH), sampler=Oldest(), wait_s=FOREVER))
    core.tickets(0, holding=[each.id for each in hung])
    play(core, core.tickets(8, holding=[each.id for each in hung]))
    assert core.plan(2) is not None
