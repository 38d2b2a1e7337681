"""Defines the records of the store, and the states that a trajectory passes through."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Self

from msgspec import Struct

from asyncrl.ids import ticket_id
from asyncrl.replay.store.images import forget_images
from asyncrl.replay.store.transaction import Key, Transaction
from asyncrl.types import Finish, Purpose


class TrajectoryState(StrEnum):
    """The state of a trajectory. The last six states are final, except that a dead letter can be tried again. Each
    final state has a counter with the name of the state."""

    WAITING = "waiting"
    LEASED = "leased"
    LABELLED = "labelled"
    PLANNED = "planned"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    EVICTED = "evicted"
    FILTERED = "filtered"
    DROPPED = "dropped"
    DEAD = "dead"


LIVE = (TrajectoryState.WAITING, TrajectoryState.LEASED, TrajectoryState.LABELLED, TrajectoryState.PLANNED)
ENDS = tuple(state for state in TrajectoryState if state not in LIVE)
UNTRAINED = tuple(state for state in ENDS if state is not TrajectoryState.TRAINED)
THROWN_AWAY = (TrajectoryState.EVICTED, TrajectoryState.FILTERED, TrajectoryState.DROPPED)


MAX_REASON = 200


class Record(Struct, array_like=True):
    """A row of the store's `table`, stored as the list of its fields."""

    table: ClassVar[str]

    @classmethod
    def load(cls, tx: Transaction, key: Key) -> Self | None:
        return tx.get(cls.table, key, cls)

    @classmethod
    def of(cls, tx: Transaction, key: Key) -> Self:
        """A record to which another record refers, so that it must exist. Raises StoreError: it is missing."""
        return tx.present(cls.load(tx, key), cls.table, key)

    @classmethod
    def all(cls, tx: Transaction) -> list[tuple[str, Self]]:
        """Every record with its key, in the order of the keys."""
        return [(key.decode(), value) for key, value in tx.items(cls.table, cls)]

    @classmethod
    def page(cls, tx: Transaction, prefix: str, after: str, count: int, backwards: bool) -> list[tuple[str, Self]]:
        """The next `count` records whose keys begin with `prefix`: after the key `after`, or from the first key if
        `after` is empty. With `backwards`, the records before `after`, or from the last key."""
        return [(name, cls.of(tx, name)) for name in tx.page(cls.table, after, count, prefix, backwards)]

    def save(self, tx: Transaction, key: Key) -> None:
        tx.put(self.table, key, self)


def shorten(reason: str) -> str:
    """A reason, cut to the length that a trajectory's record keeps."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


class TrajectoryRecord(Record):
    """The permanent facts about a trajectory.

    - `sampled`: the number of its tokens that the policy sampled
    - `oldest`: the oldest version that sampled one of its tokens
    - `attempts`: the number of leases since the last result
    - `scored`: the number of kinds of scores that are done
    - `leased`: the number of further kinds that are leased to a scorer
    - `reward`, `outcome`: valid after the first score
    - `plans`: the number of plans that contain the trajectory
    - `last_plan`: the step of the newest of these plans
    - `trained`: the number of these plans that a checkpoint covers
    - `lag`: the age in policy versions that the trajectory had when it was last planned or was evicted; -1 before that,
      and always for a demonstration. With masked tokens, the age of its oldest trained token, or -1 if none is trained
    - `turns`: the number of the policy's turns
    - `seconds`: the length of the episode
    - `reason`: the reason why the trajectory was evicted, filtered, dropped or given up
    - `process`: the step scores as one number, if a process model scored the steps
    - `vote`: the short answer (see `Labels`)
    - `row`: the task's row in the training or evaluation file, or -1 in imported stores
    - `newest`: the newest version that sampled one of its tokens; -1 if it is unknown
    - `masked`: the number of its sampled tokens that its plan does not train, since they are too old
    """

    table = "trajectories"
    group: str
    member: int
    tokens: int
    sampled: int
    oldest: int
    state: TrajectoryState = TrajectoryState.WAITING
    attempts: int = 0
    scored: int = 0
    leased: int = 0
    reward: float = 0.0
    outcome: float = 0.0
    plans: int = 0
    last_plan: int = -1
    trained: int = 0
    lag: int = -1
    turns: int = 0
    finish: str = ""
    seconds: float = 0.0
    data_source: str = ""
    reason: str = ""
    process: float | None = None
    vote: str = ""
    row: int = -1
    newest: int = -1
    masked: int = 0

    @property
    def is_demonstration(self) -> bool:
        return self.finish == Finish.DEMONSTRATION

    @property
    def trained_tokens(self) -> int:
        """The number of its sampled tokens that its plan trains."""
        return self.sampled - self.masked

    def lag_at(self, version: int) -> int:
        """The lag: the age in versions of its oldest token at a policy `version`; -1 for a demonstration."""
        return -1 if self.is_demonstration else version - self.oldest

    def trained_lag_at(self, version: int) -> int:
        """The lag of its oldest trained token in a plan at a policy `version`; -1 for a demonstration, and if no token
        is trained."""
        # Only a trajectory that is in one plan can have masked tokens, and `lag` is of that plan.
        return self.lag if self.masked else self.lag_at(version)


class GroupRecord(Record):
    """An open group.

    - `row`: the task's row in the training or evaluation file
    - `version`: in an evaluation, the oldest policy version that may play the members; 0 in training
    - `attempts`: the number of failures of each member
    - `labelled`: true for each labelled member
    - `sampled`: the number of plans that contain the group
    - `demonstrated`: true if the last member is the task's demonstration. The policy plays only the other members
    - `begun`: the newest policy version when a training group was opened; -1 in an evaluation
    """

    table = "groups"
    row: int
    purpose: Purpose
    version: int
    attempts: list[int]
    labelled: list[bool]
    sampled: int = 0
    demonstrated: bool = False
    begun: int = -1

    @property
    def training(self) -> bool:
        return self.purpose is Purpose.TRAIN

    @property
    def played(self) -> int:
        """The number of members that the policy plays. Admission counts only these, since a demonstration never gets
        too old."""
        return len(self.attempts) - self.demonstrated

    def is_demonstration(self, member: int) -> bool:
        return self.demonstrated and member == len(self.attempts) - 1

    def ids(self, group: str) -> list[str]:
        """The members' ticket ids. A trajectory has the same id as its ticket."""
        return [ticket_id(group, member, attempt) for member, attempt in enumerate(self.attempts)]


class ReadyGroup(Struct, array_like=True):
    """A complete and labelled group that may be trained.

    - `oldest`, `newest`: the oldest and the newest version that sampled one of its tokens. `newest` is -1 if it is
      unknown
    - `spread`: the standard deviation of its members' rewards
    """

    name: str
    oldest: int
    spread: float
    newest: int = -1


class TicketRecord(Record):
    """An open ticket, which permits one episode.

    - `worker`: the actor that holds it, or empty while it waits for an actor
    - `version`: the oldest policy version that may start the episode, decided when the actor got the ticket; -1 while
      it waits for an actor, and if it is unknown
    """

    table = "tickets"
    group: str
    member: int
    worker: str = ""
    version: int = -1


class EvaluationRecord(Record):
    """The evaluation of one policy version.

    - `total`: the number of all attempts
    - `done`: the number of attempts that have ended
    - `failed`: the number of attempts that ended without a score
    - `outcome`, `reward`: sums over the scored attempts
    - `tokens`: the number of sampled tokens
    - `newer_tokens`: the number of tokens that versions newer than the evaluated one sampled
    - `newest`: the newest version that sampled any token
    - `right`: the number of outcomes of at least 1
    - `sample`: the ids of the episodes whose data is kept
    """

    table = "evaluations"
    total: int
    done: int = 0
    failed: int = 0
    outcome: float = 0.0
    reward: float = 0.0
    tokens: int = 0
    newer_tokens: int = 0
    newest: int = -1
    right: int = 0
    sample: list[str] = []


class DeadLetter(Record):
    """A failed attempt with its `reason`.

    - `row`: the task's row in the training file, or -1 for a held-out task or a closed group
    - `scoring`: true if the episode is stored, but could not be scored
    - `order`: the key of the letter in `dead_by_age`
    - `size`: the bytes of the letter and its episode in the store
    """

    table = "dead"
    reason: str
    group: str
    member: int
    attempt: int
    row: int
    scoring: bool
    order: int = 0
    size: int = 0


def count_dead(tx: Transaction, record: TrajectoryRecord) -> None:
    """Add a training trajectory and its tokens to the counters of dead trajectories."""
    tx.add(TrajectoryState.DEAD)
    tx.add("tokens_dead", record.sampled)


def count_revived(tx: Transaction, record: TrajectoryRecord) -> None:
    """Undo `count_dead` for a trajectory."""
    tx.add(TrajectoryState.DEAD, -1)
    tx.add("tokens_dead", -record.sampled)


def forget(tx: Transaction, trajectory: str) -> None:
    """Delete the data and labels of a trajectory, and the images that only it contains. Its record stays."""
    tx.delete("data", trajectory)
    tx.delete("labels", trajectory)
    forget_images(tx, trajectory)
