"""Batch plans: complete groups to learner steps. A plan is recorded before it is handed out, and never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.errors import RefusedError
from asyncrl.replay.groups import Groups
from asyncrl.replay.records import Facts, Group, Letter, State
from asyncrl.replay.rules import Rules
from asyncrl.replay.samplers import Candidate, Choice
from asyncrl.replay.store import Transaction
from asyncrl.types import BatchPlan
from asyncrl.wire import plan_body, read_plan


class Planning:
    """What the replay does for the learner, each call within the caller's transaction."""

    def __init__(self, rules: Rules, groups: Groups) -> None:
        self._rules = rules
        self._groups = groups
        self._wanted = rules.batch_size // rules.group_size
        self._asked = 0

    def plan(self, tx: Transaction, step: int) -> BatchPlan | None:
        """The plan of `step`: the recorded one, else a new one if enough groups are ready, else None.

        Groups that are older than the bound at this step are evicted. Raises RefusedError: steps were skipped.
        """
        self._asked = step
        recorded = tx.get("plans", step)
        if recorded is not None:
            return read_plan(recorded)
        if step != tx.count("plans"):
            raise RefusedError(f"step {step} cannot be planned: the next one is {tx.count('plans')}")
        if tx.count("ready") < self._wanted:
            return None
        version = self._rules.version_at(step)
        self._evict(tx, version)
        ready = [Candidate(order, *value) for order, value in tx.ordered("ready")]
        if len(ready) < self._wanted:
            return None
        rng = np.random.default_rng([self._rules.seed, self._rules.shard, step])
        return self._record(tx, step, self._rules.sampler.choose(ready, self._wanted, rng))

    def missing(self, tx: Transaction) -> str:
        """Why there is no plan now: "labels", if all that was delivered made one once it is scored; "store", if that is
        too full for new tickets; else "episodes"."""
        delivered = tx.count("ready")
        for name, value in tx.items("groups"):
            group = Group(*value)
            open_group = group.training and not all(group.labelled)
            delivered += open_group and all(Facts.load(tx, each) for each in group.ids(name.decode()))
        if delivered >= self._wanted:
            return "labels"
        return "store" if tx.live_bytes() > self._rules.high_water_bytes else "episodes"

    def published(self, tx: Transaction, version: int) -> None:
        """The learner has published `version`: what is too old for it goes at once. Versions never go back."""
        if version > tx.counter("version"):
            tx.set("version", version)
            self._evict(tx, version)

    def _evict(self, tx: Transaction, version: int) -> None:
        for order, (name, oldest, _) in list(tx.ordered("ready")):
            if oldest < self._rules.oldest_allowed(version):
                tx.delete("ready", order)
                if self._rules.reissue_evicted and not Group.of(tx, name).sampled:
                    tx.append("again", Group.of(tx, name).row)
                self._groups.close(tx, name, State.EVICTED)

    def _record(self, tx: Transaction, step: int, chosen: Sequence[Choice]) -> BatchPlan:
        entries = [
            (name, Facts.of(tx, name), each.weight)
            for each in chosen
            for name in Group.of(tx, each.candidate.name).ids(each.candidate.name)
        ]
        plan = BatchPlan(
            step=step,
            version=self._rules.version_at(step),
            ids=[name for name, _, _ in entries],
            group_ids=[facts.group for _, facts, _ in entries],
            tokens=[facts.tokens for _, facts, _ in entries],
            sampled=[facts.sampled for _, facts, _ in entries],
            weights=[weight for _, _, weight in entries],
        )
        tx.put("plans", step, plan_body(plan))
        for name, facts, _ in entries:
            facts.state, facts.plans, facts.last_plan = State.PLANNED, facts.plans + 1, step
            facts.save(tx, name)
        for each in chosen:
            self._use(tx, each.candidate)
        return plan

    def _use(self, tx: Transaction, candidate: Candidate) -> None:
        group = Group.of(tx, candidate.name)
        group.sampled += 1
        group.save(tx, candidate.name)
        if group.sampled == self._rules.admission.uses:
            tx.delete("ready", candidate.order)
            self._groups.close(tx, candidate.name, State.PLANNED)

    def skip(self, tx: Transaction, step: int, reason: str) -> int:
        """Have the step of a recorded plan train nothing, for good; returns how many trajectories are dead letters now.

        Those that no other plan names are; no later plan takes them or their groups. A plan that is skipped already
        stays as it is. Raises RefusedError: there is no such plan, or the learner's weights hold what it trained.
        """
        recorded = tx.get("plans", step)
        if recorded is None:
            raise RefusedError(f"step {step} has no recorded plan; {tx.count('plans')} steps are planned, from 0 on")
        plan = read_plan(recorded)
        if plan.skipped:
            return 0
        if step < tx.counter("released_steps") or self._rules.version_at(step) < tx.counter("version"):
            raise RefusedError(f"step {step} was trained: weights that come after it are checkpointed or published")
        if step < self._asked:
            raise RefusedError(
                f"step {step} was trained: the learner is at step {self._asked} now; should it resume from before step "
                f"{step} and fail there, ask again"
            )
        tx.put("plans", step, plan_body(replace(plan, skipped=reason)))
        tx.add("plans_skipped")
        members = [(name, Facts.of(tx, name)) for name in plan.ids]
        dead = sum(self._bury(tx, name, facts, f"plan {step} was skipped: {reason}") for name, facts in members)
        self._end_groups(tx, set(plan.group_ids))
        for name, facts in members:
            if facts.state != State.DEAD:
                self._groups.release(tx, name, Facts.of(tx, name))
        return dead

    def _bury(self, tx: Transaction, name: str, facts: Facts, reason: str) -> bool:
        """Take a trajectory out of a plan; whether it is dead now, since no other names it."""
        facts.plans -= 1
        if not facts.plans:
            facts.state = State.DEAD
            tx.add(State.DEAD)
            group = Group.load(tx, facts.group)
            attempt = int(name.rsplit(".", 1)[1])
            letter = Letter(reason, facts.group, facts.member, attempt, group.row if group else -1, False)
            self._groups.bury(tx, name, letter)
        facts.save(tx, name)
        return not facts.plans

    def _end_groups(self, tx: Transaction, names: set[str]) -> None:
        """End those of the groups that could go into another plan."""
        for order, (name, *_) in list(tx.ordered("ready")):
            if name in names:
                tx.delete("ready", order)
                self._groups.close(tx, name, State.DROPPED)

    def checkpointed(self, tx: Transaction, steps: int, kept: int) -> None:
        """A checkpoint covers the first `steps` steps: what they trained is released, once. What every kept checkpoint
        covers, the first `kept` steps, is forgotten when it has been kept for long enough.

        Raises RefusedError: so many steps were never planned, so this is a checkpoint of another run.
        """
        planned, released = tx.count("plans"), tx.counter("released_steps")
        if max(steps, kept) > planned:
            raise RefusedError(
                f"a checkpoint of {max(steps, kept)} steps is not of this run, which has planned {planned}: "
                "restore the store that belongs to the checkpoints, or give the run another run.name"
            )
        for step in range(released, steps):
            plan = read_plan(tx.get("plans", step))
            for name in () if plan.skipped else plan.ids:
                facts = Facts.of(tx, name)
                facts.trained += 1
                facts.save(tx, name)
                self._groups.release(tx, name, facts)
            released = step + 1
        tx.set("released_steps", released)
        self._forget_until(tx, min(kept, self._rules.first_kept(released)))

    def _forget_until(self, tx: Transaction, kept: int) -> None:
        forgotten = tx.counter("forgotten_steps")
        for step in range(forgotten, kept):
            for name in tx.get("plans", step)["ids"]:
                facts = Facts.of(tx, name)
                if facts.state == State.TRAINED and facts.last_plan == step:
                    self._groups.forget(tx, name)
        tx.set("forgotten_steps", max(forgotten, kept))
