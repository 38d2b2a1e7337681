"""Batch plans: complete groups to learner steps. A plan is recorded before it is handed out, and never changes."""

from __future__ import annotations

from asyncrl.errors import RefusedError
from asyncrl.replay.groups import Groups, Rules
from asyncrl.replay.records import Facts, Group, State
from asyncrl.replay.store import Transaction
from asyncrl.types import BatchPlan
from asyncrl.wire import plan_body, read_plan


class Planning:
    """What the replay does for the learner, each call within the caller's transaction."""

    def __init__(self, rules: Rules, groups: Groups) -> None:
        self._rules = rules
        self._groups = groups

    def plan(self, tx: Transaction, step: int) -> BatchPlan | None:
        """The plan of `step`: the recorded one, else a new one if enough groups are ready, else None.

        Groups that are older than the bound at this step are evicted. Raises RefusedError: steps were skipped.
        """
        recorded = tx.get("plans", step)
        if recorded is not None:
            return read_plan(recorded)
        if step != tx.count("plans"):
            raise RefusedError(f"step {step} cannot be planned: the next one is {tx.count('plans')}")
        chosen = self._choose(tx, self._rules.version_at(step))
        if len(chosen) < self._rules.batch_size // self._rules.group_size:
            return None
        return self._record(tx, step, chosen)

    def _choose(self, tx: Transaction, version: int) -> list[tuple[int, str]]:
        """The oldest ready groups, as many as a batch has; those beyond the age bound are evicted on the way."""
        wanted = self._rules.batch_size // self._rules.group_size
        oldest_allowed = version - self._rules.admission.max_lag
        chosen: list[tuple[int, str]] = []
        for key, name in list(tx.items("ready")):
            order = int.from_bytes(key, "big")
            if self._oldest(tx, name) < oldest_allowed:
                tx.delete("ready", order)
                self._groups.close(tx, name, State.EVICTED)
            elif len(chosen) < wanted:
                chosen.append((order, name))
        return chosen

    def _members(self, tx: Transaction, name: str) -> list[str]:
        group = Group.load(tx, name)
        assert group is not None
        return group.ids(name)

    def _facts(self, tx: Transaction, trajectory: str) -> Facts:
        facts = Facts.load(tx, trajectory)
        assert facts is not None
        return facts

    def _oldest(self, tx: Transaction, name: str) -> int:
        return min(self._facts(tx, trajectory).oldest for trajectory in self._members(tx, name))

    def _record(self, tx: Transaction, step: int, chosen: list[tuple[int, str]]) -> BatchPlan:
        ids = [trajectory for _, name in chosen for trajectory in self._members(tx, name)]
        facts = [self._facts(tx, trajectory) for trajectory in ids]
        plan = BatchPlan(
            step=step,
            version=self._rules.version_at(step),
            ids=ids,
            group_ids=[each.group for each in facts],
            tokens=[each.tokens for each in facts],
            sampled=[each.sampled for each in facts],
        )
        tx.put("plans", step, plan_body(plan))
        for order, name in chosen:
            tx.delete("ready", order)
            self._groups.close(tx, name, State.PLANNED)
        return plan

    def checkpointed(self, tx: Transaction, steps: int) -> None:
        """A checkpoint covers the first `steps` steps: what they trained is released, once."""
        for step in range(tx.counter("released_steps"), min(steps, tx.count("plans"))):
            for trajectory in tx.get("plans", step)["ids"]:
                facts = self._facts(tx, trajectory)
                facts.state = State.TRAINED
                facts.save(tx, trajectory)
                self._groups.forget(tx, trajectory)
                tx.add(State.TRAINED)
            tx.put("meta", "released_steps", step + 1)
