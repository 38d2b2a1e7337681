"""Decides when the learner waits for running groups that would otherwise become too old.

A group that began at version u is trained at version u + max_lag at the latest. If its last member still runs then, the
group is thrown away. So before a step is planned, `OldGroups` compares two numbers for every version u:

- `unfinished`: the groups that are not complete, and that may have tokens of version u or older
- `later`: the groups that the batches after this step can train until version u + max_lag

The step waits as long as `unfinished` exceeds `later` for some u. It does not wait if its batch is full of groups as
old as u, which are groups with tokens of version u or older. Then waiting would let no further old group into the
batch.

With this rule no group becomes too old. Let n(u) be the number of groups that are in no plan yet and may have tokens of
version u or older. Let r(u) be the number of groups that the batches from the next step on can train until version u +
max_lag.

The claim is n(u) <= r(u). At the last step of version u + max_lag, r(u) is one batch. That batch takes the oldest
groups first, so it takes all groups that n(u) still counts. The claim holds from the beginning of version u on:

- Begin: while u is the newest version, n(u) counts at most all groups in no plan. With B trajectories trained per
  version, admission has let in at most (max_lag + u + 1) * B trajectories by then. All batches until version u +
  max_lag train just as many. So the claim holds. Episodes that start later have newer tokens.
- Step: a batch that is full of groups as old as u lowers both numbers by one batch. Any other batch takes all complete
  groups as old as u. Such a batch is planned only once `unfinished` <= `later`, which is the claim for the time after
  this batch.

The claim also relies on tickets. A ticket names a version, and its episode starts only once the engine serves that
version or a newer one. If `wait_s` is a number above 0, a ticket names the version that is the newest when the
ticket is given out. With the default limit, a ticket may name an older version u if at most r(u) groups are in no plan
at that moment (`starts/fresh_starts.py`).

The wait ends at the latest when all groups are complete, since nothing is unfinished then. Groups that filters refuse
make the numbers smaller.

A step trains groups for which it has waited: by the claim they fit into its batch, which takes the oldest groups first.
So the wait is useful at the last step of a run, too, although later(u) then counts batches that never come.

Some groups still become too old:

- groups that are given up after the limit of a wait, which is short by default
- groups with an episode that waited for minutes and then started with an older version than its ticket names
- groups that still run while a step trains nothing from this shard
- surplus groups of `replay.oversample`
- groups that outlive a change to a smaller max_lag

An actor may also deliver an episode although the replay has given its ticket to another actor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import GroupRecord, ReadyGroup, TicketRecord, TrajectoryRecord
from asyncrl.replay.store.transaction import Transaction
from asyncrl.text import duration

FIRST_WAITED_FOR = "first_waited_for"
"""The counter that has the oldest version whose groups are waited for. Groups of older versions were given up because a
wait for them reached its limit."""
EARLY_STARTS = "early_starts"
"""The counter with the largest number of versions by which the version that a ticket names was older than the version
at which the ticket's group was opened."""
LIMITS_REACHED = "wait_limits_reached"
"""The counter of steps that were planned only because the wait had reached its limit."""
STEPS = 8
"""The number of last steps whose training times count: their median limits a wait if the settings have no limit."""
IDLE = 3
"""A wait for old groups takes at most this many times the time for which the learner waits for a full batch in any
case. Groups that complete during the wait shorten that time. If engines are so fast that the learner never lacks a full
batch, it never waits for old groups."""
ASKED_S = 60.0
"""A learner that has requested nothing for longer than this has died, or was stopped. Its wait begins again."""


@dataclass(frozen=True, slots=True)
class OldWait:
    """The groups for which a step waits.

    - `groups`: the number of groups that must be completed before the step is planned
    - `version`: the version at which the oldest of them began
    - `newest`: the newest version u for which too many groups are unfinished
    """

    groups: int
    version: int
    newest: int


class OldGroups:
    """The waits of one shard. `clock` gives monotonic seconds.

    When a step has waited for `limit_s` seconds, it is planned. The groups for which it waited are never waited for
    again, even after a restart. After a restart of the replay, the present wait begins again, and the times that steps
    took are forgotten.
    """

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._wanted = settings.batch_size // settings.group_size
        self._since: tuple[int, float] | None = None
        self._asked = 0.0
        self._planned: tuple[int, float] | None = None
        self._is_first = True
        self._step_s = deque[float](maxlen=STEPS)
        self._asked_for: tuple[int, float] | None = None
        self._is_counted = False
        self._idle_s = deque[float](maxlen=STEPS)

    @property
    def limit_s(self) -> float:
        """The longest wait in seconds: `ReplaySettings.wait_s`, if it is set. Otherwise it is the shorter of two times:
        the median training time of the last steps, and IDLE times the mean time for which the learner lacked a full
        batch before them. 0 before these times are known."""
        fixed = self._settings.wait_s
        if fixed is not None:
            return fixed
        return min(median(self._step_s or (0.0,)), IDLE * fmean(self._idle_s or (0.0,)))

    def reached(self, step: int) -> None:
        """Note that the learner requests `step`, since it has trained all steps before."""
        if self._asked_for is None or self._asked_for[0] != step:
            self._asked_for, self._is_counted = (step, self._clock()), False
        if self._planned is None or step == self._planned[0]:
            return
        follows = step == self._planned[0] + 1
        # A learner's first step may take much longer, since it compiles or starts engines.
        if follows and not self._is_first:
            self._step_s.append(self._clock() - self._planned[1])
        self._is_first, self._planned = not follows, None

    def given(self, step: int) -> None:
        """Note that the learner gets the plan of `step`. With several shards it requests the plan again until every
        shard has one, and then trains."""
        self._full(step)
        self._planned = step, self._clock()

    def _full(self, step: int) -> None:
        """Note that the batch of `step` is full: from now on the learner waits only for old groups."""
        if self._asked_for is not None and self._asked_for[0] == step and not self._is_counted:
            self._idle_s.append(self._clock() - self._asked_for[1])
            self._is_counted = True

    def wait(self, tx: Transaction, step: int, ready: Sequence[ReadyGroup]) -> OldWait | None:
        """The groups for which `step` must wait. `None` if it may be planned now. `ready` are the complete groups that
        are not too old."""
        if not self.limit_s or self._is_full(tx):
            return None
        unfinished = [
            (name, group) for name, group in GroupRecord.all(tx) if group.training and not all(group.labelled)
        ]
        complete = sorted(each.oldest for each in ready)
        # Most often a bound on the versions is enough to see that there is no need to wait.
        early = tx.counter(EARLY_STARTS)
        rough = self._exceeding(step, sorted(group.begun - early for _, group in unfinished), complete)
        if not rough:
            return None
        least = rough[-1] + early
        old = (each for name, group in unfinished if group.begun <= least for each in self._oldest(tx, name, group))
        first = max(self._settings.oldest_allowed(self._settings.version_at(step)), tx.counter(FIRST_WAITED_FOR))
        # Groups that are too old, or were given up, take places of a batch only if their old tokens are masked.
        begun = sorted(version for version in old if self._settings.masks_old or version >= first)
        exceeding = [version for version in self._exceeding(step, begun, complete) if version >= first]
        if not exceeding:
            return None
        groups = bisect_right(begun, exceeding[0]) - self._later(step, exceeding[0])
        return OldWait(groups, next(version for version in begun if version >= first), exceeding[-1])

    def _is_full(self, tx: Transaction) -> bool:
        """True if the store takes no further episodes, so that an old group could not be completed."""
        return tx.episode_bytes() > self._settings.full_bytes

    def _exceeding(self, step: int, begun: Sequence[int], complete: Sequence[int]) -> list[int]:
        """The versions u for which too many groups are unfinished, ascending. `begun` has the version of each
        unfinished group, and `complete` that of each complete group, both ascending."""
        return [
            version
            for version in dict.fromkeys(begun)
            if bisect_right(begun, version) > self._later(step, version)
            and bisect_right(complete, version) < self._wanted
        ]

    def _later(self, step: int, version: int) -> int:
        """The number of groups that the batches after `step` can train before tokens of `version` are too old."""
        end = (version + self._settings.admission.max_lag + 1) * self._settings.publish_every
        return max(0, end - (step + 1)) * self._wanted

    def _oldest(self, tx: Transaction, name: str, group: GroupRecord) -> Iterator[int]:
        """The oldest version that may have sampled a token of an unfinished group. Yields nothing if no member has
        begun: its tickets wait for an actor."""
        versions = []
        for member, ticket in enumerate(group.ids(name)):
            if group.is_demonstration(member):
                continue
            record, open_ticket = TrajectoryRecord.load(tx, ticket), TicketRecord.load(tx, ticket)
            if record is not None:
                versions.append(record.oldest)
            elif open_ticket is not None and open_ticket.worker:
                versions.append(open_ticket.version)
        if versions:
            yield min(versions)

    def may_wait(self, tx: Transaction, step: int, wait: OldWait) -> bool:
        """True if the learner still waits before `step`, which it must have requested. False once this wait has reached
        its limit."""
        self._full(step)
        now = self._clock()
        if self._since is None or self._since[0] != step or now - self._asked > ASKED_S:
            self._since = step, now
        self._asked = now
        if now - self._since[1] < self.limit_s:
            return True
        tx.add(LIMITS_REACHED)
        tx.set(FIRST_WAITED_FOR, max(tx.counter(FIRST_WAITED_FOR), wait.newest + 1))
        return False

    def has_waited(self, step: int) -> bool:
        """True if the learner waited for old groups before `step`."""
        return self._since is not None and self._since[0] == step

    def described(self, wait: OldWait) -> str:
        """The wait of the present step as the end of a sentence about the learner."""
        seconds = 0.0 if self._since is None else self._clock() - self._since[1]
        groups = "the oldest group" if wait.groups == 1 else f"the {wait.groups} oldest groups"
        return (
            f"waits for {groups}, begun at version {wait.version}, for {duration(seconds)} of at most "
            f"{duration(self.limit_s)} (replay.old_groups.wait_s)"
        )
