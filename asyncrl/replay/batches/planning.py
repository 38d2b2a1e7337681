"""Makes the batch plans, which assign complete groups to learner steps. A plan is recorded before the learner gets it,
and never changes.

The age bound is enforced here: a group with a token older than max_lag is not planned, but evicted and counted. If such
tokens are masked (`old_tokens.py`), only groups without younger tokens are evicted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.errors import RefusedError
from asyncrl.ids import attempt_of
from asyncrl.replay.batches.members import Members, read_members
from asyncrl.replay.batches.old_groups import OldGroups, OldWait
from asyncrl.replay.batches.old_tokens import deciding_version, mask, unmask
from asyncrl.replay.failures.dead_letters import DeadLetters
from asyncrl.replay.groups import OpenGroups
from asyncrl.replay.labels.label_needs import set_label_needs, unfit_members
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.stages import Stage, Stages
from asyncrl.replay.starts.pacing import Pace
from asyncrl.replay.store.records import (
    DeadLetter,
    GroupRecord,
    ReadyGroup,
    TrajectoryRecord,
    TrajectoryState,
    count_dead,
    forget,
    shorten,
)
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import BatchPlan, LabelNeeds

log = logging.getLogger(__name__)


class Planning:
    """Handles the learner's requests for plans. Each call is part of the caller's transaction."""

    def __init__(
        self,
        settings: ReplaySettings,
        groups: OpenGroups,
        dead_letters: DeadLetters,
        stages: Stages,
        pace: Pace,
        old_groups: OldGroups,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._pace = pace
        self._old_groups = old_groups
        self.old_wait: OldWait | None = None
        """The groups for which the step of the learner's last request must wait. `None` if the step need not wait."""
        self._dead_letters = dead_letters
        self._stages = stages
        self._wanted = settings.batch_size // settings.group_size

    def evict_old(self, tx: Transaction) -> None:
        """Evict the groups that are too old, in case the age bound was lowered before this process started."""
        self._evict(tx, tx.counter("version"))

    def require(self, tx: Transaction, needs: LabelNeeds, first: int) -> None:
        """Plan only episodes whose labels meet these needs, from step `first` on. If the algorithm has changed, some
        stored labels might not meet the needs: their episodes become dead letters (kept for inspection, but not
        trained), and the groups of these episodes are dropped."""
        if not set_label_needs(tx, needs):
            return
        self._withdraw(tx, first)
        dropped = {}
        for name, group in GroupRecord.all(tx):
            for member, reason in unfit_members(tx, group.ids(name)).items() if group.training else ():
                dropped[name] = f"{member} cannot be trained: {reason}"
                record = TrajectoryRecord.of(tx, member)
                if not record.plans:
                    self._bury(tx, member, record, dropped[name], scoring=True)
        self._drop(tx, dropped)

    def _withdraw(self, tx: Transaction, first: int) -> None:
        """Withdraw the plan of step `first` if some of its labels do not meet the needs. The learner cannot have
        trained this step yet: the plan may exist only because this shard has planned the step before other shards."""
        plan = tx.get("plans", first, BatchPlan)
        if plan is None or plan.skipped or first != tx.count("plans") - 1:
            return
        if unfit := unfit_members(tx, plan.ids):
            member, reason = next(iter(unfit.items()))
            self._give_up(tx, plan, f"plan {first} was withdrawn: {member} cannot be trained: {reason}")
            tx.delete("plans", first)
            # The step will be planned again, so new episodes must take the place of these.
            tx.add("committed", len(plan.demonstrations) - len(plan.ids))

    def plan(self, tx: Transaction, step: int) -> BatchPlan | None:
        """The recorded plan of `step`, or a new plan if enough groups are ready. `None` if there are too few, or if the
        step waits for old groups.

        Groups that are too old for this step are evicted. Raises RefusedError: `step` has no plan, and is not the next
        step to plan."""
        self._reach(tx, step)
        self.old_wait = None

        def waits(wait: OldWait) -> bool:
            self.old_wait = wait if self._old_groups.may_wait(tx, step, wait) else None
            return self.old_wait is not None

        if (plan := self._planned(tx, step, waits)) is not None:
            self._old_groups.given(step)
        return plan

    def plan_at_once(self, tx: Transaction, step: int) -> BatchPlan:
        """The recorded plan of `step`, or else a new plan. A new plan waits for no old groups, and has no trajectories
        if too few groups are ready. Raises RefusedError: `step` has no plan, and is not the next step to plan."""
        self._reach(tx, step)
        if (plan := self._planned(tx, step, lambda wait: False)) is not None:
            return plan
        # Admission lets in one batch of trajectories for each step. This step trains none, so admission must let in
        # none for it.
        tx.add("committed", self._settings.batch_size)
        return self._record(tx, step, [], Members())

    def _reach(self, tx: Transaction, step: int) -> None:
        """Note that the learner has reached `step`."""
        self._old_groups.reached(step)
        if tx.counter("learner_step") != step and step <= tx.count("plans"):
            tx.set("learner_step", step)

    def plan_ahead(self, tx: Transaction, step: int) -> BatchPlan | None:
        """The plan of a step that the learner has not reached. `None` if it cannot be made yet.

        A new plan is made only if the sampler allows this (`plans_ahead`). The age bound of a step does not depend on
        the time at which it is planned."""
        if self._settings.sampler.plans_ahead and step == tx.count("plans"):
            return self._planned(tx, step, lambda wait: True)
        return tx.get("plans", step, BatchPlan)

    def _planned(self, tx: Transaction, step: int, waits: Callable[[OldWait], bool]) -> BatchPlan | None:
        """The recorded plan of `step`, or a new plan. `None` if too few groups are ready, or if the step must wait for
        old groups and `waits` returns true."""
        recorded = tx.get("plans", step, BatchPlan)
        if recorded is None and step != tx.count("plans"):
            raise RefusedError(f"step {step} cannot be planned: the next step is {tx.count('plans')}")
        if recorded is not None or tx.count("ready") < self._wanted:
            return recorded
        version = self._settings.version_at(step)
        self._evict(tx, version)
        while True:
            ready = list(tx.items("ready", ReadyGroup))
            if len(ready) < self._wanted:
                return None
            wait = self._old_groups.wait(tx, step, [group for _, group in ready])
            if wait is not None and waits(wait):
                return None
            rng = np.random.default_rng([self._settings.seed, self._settings.shard, step])
            chosen = self._settings.sampler.choose([group for _, group in ready], self._wanted, rng)
            names = [ready[index][1].name for index, _ in chosen]
            members = read_members(tx, names, self._settings.oldest_allowed(version))
            if not members.damaged:
                return self._record(tx, step, [(*ready[index], weight) for index, weight in chosen], members)
            self._give_up_damaged(tx, members)

    def _give_up_damaged(self, tx: Transaction, members: Members) -> None:
        """Make dead letters of the damaged members of complete groups, and drop these groups."""
        dropped = {}
        for name, record in members.records:
            if name in members.damaged:
                log.error("%s is given up: %s", name, members.damaged[name])
                tx.add("damaged")
                dropped[record.group] = members.damaged[name]
                if not record.plans:
                    self._bury(tx, name, record, members.damaged[name])
        self._drop(tx, dropped)

    def missing(self, tx: Transaction) -> str:
        """The reason why there is no plan:

        - "old_groups": the step waits for old groups
        - "labels": enough groups are delivered, but some of them lack scores
        - "store": the store is too full for new tickets
        - "episodes": in all other cases
        """
        if self.old_wait is not None:
            return "old_groups"
        delivered = tx.count("ready")
        for name, group in GroupRecord.all(tx):
            incomplete = group.training and not all(group.labelled)
            delivered += incomplete and all(TrajectoryRecord.load(tx, each) for each in group.ids(name))
        if delivered >= self._wanted:
            return "labels"
        return "store" if tx.live_bytes() > self._settings.high_water_bytes else "episodes"

    def published(self, tx: Transaction, version: int) -> None:
        """Note that the learner has published `version`, and evict groups that are too old for it. Older versions are
        ignored."""
        if version > tx.counter("version"):
            tx.set("version", version)
            self._evict(tx, version)

    def _evict(self, tx: Transaction, version: int) -> None:
        for order, ready in list(tx.items("ready", ReadyGroup)):
            sampled_by = deciding_version(self._settings, ready)
            if sampled_by < self._settings.oldest_allowed(version):
                tx.delete("ready", order)
                group = GroupRecord.of(tx, ready.name)
                for name in group.ids(ready.name):
                    self._age(tx, name, version)
                if self._settings.reissue_evicted and not group.sampled:
                    tx.append("again", group.row)
                reason = f"sampled by version {sampled_by}: too old for version {version} (replay.max_lag)"
                self._groups.close(tx, ready.name, TrajectoryState.EVICTED, reason)

    def _age(self, tx: Transaction, name: str, version: int) -> None:
        record = TrajectoryRecord.of(tx, name)
        if not record.plans:
            record.lag = record.lag_at(version)
            record.save(tx, name)

    def _record(
        self, tx: Transaction, step: int, chosen: Sequence[tuple[bytes, ReadyGroup, float]], members: Members
    ) -> BatchPlan:
        """Record the plan of the chosen groups and their members. Each entry of `chosen` has a group's key in the table
        `ready`, the group, and its importance weight."""
        version, young = self._settings.version_at(step), members.young
        ids, records = [name for name, _ in members.records], [record for _, record in members.records]
        weights = {ready.name: weight for _, ready, weight in chosen}
        plan = BatchPlan(
            step=step,
            version=version,
            ids=ids,
            group_ids=[record.group for record in records],
            tokens=[record.tokens for record in records],
            sampled=[record.sampled for record in records],
            weights=[weights[record.group] for record in records],
            shared=members.shared,
            demonstrations=[index for index, record in enumerate(records) if record.is_demonstration],
            first_trained=[] if young is None else [self._settings.oldest_allowed(version)] * len(records),
            trained=[part.tokens for part in young or ()],
        )
        tx.put("plans", step, plan)
        for index, (name, record) in enumerate(members.records):
            record.state, record.plans, record.last_plan = TrajectoryState.PLANNED, record.plans + 1, step
            record.lag = record.lag_at(plan.version)
            if young is not None:
                mask(tx, record, young[index], plan.version)
            record.save(tx, name)
        for order, ready, _ in chosen:
            self._use(tx, order, ready.name, step)
        left = tx.count("ready") * self._settings.group_size
        self._pace.planned(tx, step, left, self._old_groups.has_waited(step))
        self._stages.mark(tx, "plan", "plans", step=step, version=plan.version, episodes=len(plan.ids))
        return plan

    def _use(self, tx: Transaction, order: bytes, name: str, step: int) -> None:
        group = GroupRecord.of(tx, name)
        self._stages.end(tx, Stage.READY, name, step=step, episodes=group.ids(name))
        group.sampled += 1
        group.save(tx, name)
        if group.sampled == self._settings.admission.uses:
            tx.delete("ready", order)
            self._groups.close(tx, name, TrajectoryState.PLANNED)
        else:
            self._stages.begin(tx, Stage.READY, name)

    def skip(self, tx: Transaction, step: int, reason: str) -> int:
        """Have the step of a recorded plan train nothing, permanently. No later plan uses the plan's trajectories or
        their groups. Trajectories that are in no other plan become dead letters: returns their number.

        A plan that was skipped before does not change. Raises RefusedError: the step has no plan, or was trained
        already.
        """
        plan = tx.get("plans", step, BatchPlan)
        if plan is None:
            raise RefusedError(f"step {step} has no recorded plan; {tx.count('plans')} steps are planned, from 0 on")
        if plan.skipped:
            return 0
        self._require_untrained(tx, step)
        tx.put("plans", step, replace(plan, skipped=reason))
        tx.add("plans_skipped")
        return self._give_up(tx, plan, f"plan {step} was skipped: {reason}")

    def _give_up(self, tx: Transaction, plan: BatchPlan, reason: str) -> int:
        """Take all trajectories out of a plan, and drop their groups. Returns how many became dead letters."""
        members = [(name, TrajectoryRecord.of(tx, name)) for name in plan.ids]
        dead = sum(self._take_out(tx, name, record, reason) for name, record in members)
        self._drop(tx, dict.fromkeys(plan.group_ids, reason))
        for name, record in members:
            if record.state is not TrajectoryState.DEAD:
                self._groups.release(tx, name, TrajectoryRecord.of(tx, name))
        return dead

    def _require_untrained(self, tx: Transaction, step: int) -> None:
        if step < tx.counter("released_steps") or self._settings.version_at(step) < tx.counter("version"):
            raise RefusedError(f"step {step} was trained: later weights are checkpointed or published")
        newest = tx.counter("learner_step")
        if step < newest:
            raise RefusedError(
                f"step {step} was trained: the learner is at step {newest} now; try again if the learner resumes "
                f"before step {step} and fails at that step"
            )

    def _take_out(self, tx: Transaction, name: str, record: TrajectoryRecord, reason: str) -> bool:
        """Remove a trajectory from a plan. True if the trajectory became a dead letter because no other plan contains
        it."""
        record.plans -= 1
        if not record.plans:
            unmask(tx, record)
            self._bury(tx, name, record, reason)
        record.save(tx, name)
        return not record.plans

    def _bury(self, tx: Transaction, name: str, record: TrajectoryRecord, reason: str, scoring: bool = False) -> None:
        """Make a dead letter of a trajectory that no plan contains."""
        record.state, record.reason = TrajectoryState.DEAD, shorten(reason)
        record.save(tx, name)
        count_dead(tx, record)
        group = GroupRecord.load(tx, record.group)
        row = group.row if group else -1
        dead = DeadLetter(reason, record.group, record.member, attempt_of(name), row, scoring)
        self._dead_letters.add(tx, name, dead)

    def _drop(self, tx: Transaction, reasons: Mapping[str, str]) -> None:
        """Drop these groups, each with its reason, so that no later plan uses them. Closed groups do not change."""
        for order, ready in list(tx.items("ready", ReadyGroup)):
            if ready.name in reasons:
                tx.delete("ready", order)
        for name, reason in reasons.items():
            self._groups.close(tx, name, TrajectoryState.DROPPED, reason)

    def checkpointed(self, tx: Transaction, steps: int, kept: int) -> None:
        """Count the trajectories of the first `steps` steps, which a checkpoint covers, as trained. Delete the data of
        the first `kept` steps, which every kept checkpoint covers, once the retention allows it.

        Raises RefusedError: fewer steps were planned, so this is a checkpoint of another run."""
        planned, released = tx.count("plans"), tx.counter("released_steps")
        if max(steps, kept) > planned:
            raise RefusedError(
                f"a checkpoint of {max(steps, kept)} steps is not of this run, which has planned {planned}: "
                "restore the store that belongs to the checkpoints, or give the run another run.name"
            )
        for step in range(released, steps):
            plan = recorded_plan(tx, step)
            for name in () if plan.skipped else plan.ids:
                record = TrajectoryRecord.of(tx, name)
                record.trained += 1
                record.save(tx, name)
                self._groups.release(tx, name, record)
        released = max(released, steps)
        tx.set("released_steps", released)
        self._forget_until(tx, min(kept, self._settings.first_kept(released)))

    def _forget_until(self, tx: Transaction, kept: int) -> None:
        forgotten = tx.counter("forgotten_steps")
        for step in range(forgotten, kept):
            for name in recorded_plan(tx, step).ids:
                record = TrajectoryRecord.of(tx, name)
                if record.state is TrajectoryState.TRAINED and record.last_plan == step:
                    forget(tx, name)
        tx.set("forgotten_steps", max(forgotten, kept))


def recorded_plan(tx: Transaction, step: int) -> BatchPlan:
    """The recorded plan of a step. Raises StoreError: it is missing."""
    return tx.present(tx.get("plans", step, BatchPlan), "plans", step)
