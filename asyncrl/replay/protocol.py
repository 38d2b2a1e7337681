"""The requests of the replay's protocol: a struct for each kind of request, which client and server share.

Requests refer to objects by id. So a request that is repeated after a lost reply takes effect only once. `messages.py`
encodes the structs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from asyncrl.types import DIGEST_BYTES, LabelNeeds, Task
from asyncrl.wire import MAX_REASON_CHARS

MAX_FETCH = 16

Name = Annotated[str, Meta(min_length=1, max_length=120)]
"""An id or a worker's name. Its UTF-8 has at most 480 bytes, and so fits into a key of the store."""
Names = Annotated[list[Name], Meta(max_length=1 << 16)]
Score = Annotated[str, Meta(min_length=1, max_length=1000)]
"""The name of a score."""
Whole = Annotated[int, Meta(ge=0, le=1 << 62)]
Version = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Reason = Annotated[str, Meta(max_length=2 * MAX_REASON_CHARS)]


class ReplayRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all requests. A `question` only reads, and may come from any client. All other requests must come from
    the served run. `frames` is true if raw frames follow the request."""

    question: ClassVar[bool] = False
    frames: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return type(self).__name__

    def queue(self) -> Hashable:
        """The queue in which the request waits. If the first request of a queue cannot be answered, no other request of
        this queue can."""
        return self


class WorkerRequest(ReplayRequest, frozen=True):
    """A request of one worker. `incarnation` identifies one process of the worker."""

    worker: Name
    incarnation: Name


class GetTickets(WorkerRequest, frozen=True):
    """Request up to `want` tickets.

    - `holding`: the tickets that the actor has
    - `waiting`: those of the `holding` tickets whose episodes are not running now
    """

    holding: Names
    waiting: Names
    want: Whole

    def queue(self) -> Hashable:
        return self.kind


class Leave(WorkerRequest, frozen=True):
    """End this incarnation of a worker. It gets no further work, and its work goes to other workers at once."""


class PutTrajectory(ReplayRequest, frozen=True):
    """Store the trajectory in the frames. The last `images` frames are its images."""

    images: Whole
    frames = True


class FailEpisode(ReplayRequest, frozen=True):
    """Report that the episode of a ticket failed."""

    ticket: Name
    reason: Reason


class LeaseTrajectories(WorkerRequest, frozen=True):
    """Request trajectories that need scores of the kinds in `serves`, with limits on their number and on their tokens.
    For the kind that scores whole groups, request up to `groups` groups."""

    serves: Annotated[list[Name], Meta(max_length=64)]
    trajectories: Whole
    tokens: Whole
    groups: Whole

    def queue(self) -> Hashable:
        return self.kind, *self.serves


class RenewLease(ReplayRequest, frozen=True):
    """Renew the leases of a scorer."""

    worker: Name


class PutLabels(WorkerRequest, frozen=True):
    """Store the labels in the frames."""

    frames = True


class PutGroupLabels(WorkerRequest, frozen=True):
    """Store the labels of all members of a group that was leased whole. If one is refused, none is stored. Each frame
    has the labels of one member in the encoding of the store."""

    frames = True


class FailScoring(WorkerRequest, frozen=True):
    """Report a failed scoring of a leased trajectory, or of its group if that was leased whole."""

    id: Name
    reason: Reason


class Configure(ReplayRequest, frozen=True):
    """Report that the learner uses these values of all configuration keys from now on. `time` is the present time in
    seconds since 1970, and `planned` the number of steps that every shard has planned."""

    values: Annotated[dict[str, Any], Meta(min_length=1)]
    time: Whole
    planned: Whole


class RequireLabels(ReplayRequest, frozen=True):
    """Plan only episodes whose labels have these scores, from step `first` on. With `unit_steps`, step scores must be
    in [-1, 1]."""

    first: Whole
    scores: Annotated[list[Score], Meta(max_length=1024)]
    unit_steps: bool

    @property
    def needs(self) -> LabelNeeds:
        return LabelNeeds(tuple(self.scores), self.unit_steps)


class GetPlan(ReplayRequest, frozen=True):
    """Request the batch plan of a learner step. With `ahead`, the learner has not reached the step yet, and the reply
    is empty if the plan cannot be made yet."""

    step: Whole
    ahead: bool


class PlanAtOnce(ReplayRequest, frozen=True):
    """Request the batch plan of a learner step. A shard that has no plan yet records one without trajectories."""

    step: Whole


class Fetch(ReplayRequest, frozen=True):
    """Request the stored frames of trajectories or of their labels."""

    table: Literal["data", "labels"]
    ids: Annotated[list[Name], Meta(max_length=MAX_FETCH)]


class FetchImage(ReplayRequest, frozen=True):
    """Request the stored bytes of an image of a trajectory. `digest` is their SHA-256."""

    id: Name
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class GetTask(ReplayRequest, frozen=True):
    """Request the task of a trajectory. The reply is empty if the replay does not know it."""

    id: Name


class Published(ReplayRequest, frozen=True):
    """Report that the learner has published a policy version."""

    version: Version


class Checkpointed(ReplayRequest, frozen=True):
    """Report that a checkpoint covers the first `steps` steps, and that every kept checkpoint covers the first `kept`
    steps."""

    steps: Whole
    kept: Whole


class Evaluate(ReplayRequest, frozen=True):
    """Run the held-out tasks with policy version `version` or a newer one."""

    version: Version


class GetEvaluation(ReplayRequest, frozen=True):
    """Request the result of an evaluation. With `wait`, the reply waits until the evaluation is complete, for a limited
    time."""

    version: Version
    wait: bool


class Finished(ReplayRequest, frozen=True):
    """Report that the learner has done the last step of the run."""


class GetStatus(ReplayRequest, frozen=True):
    """Request the counters and the sizes of the tables."""

    question = True


class GetClock(ReplayRequest, frozen=True):
    """Request the time of the replay's clock for spans, in seconds since 1970. The reply comes at once."""

    question = True


class GetAudit(ReplayRequest, frozen=True):
    """Request the audit of all accepted trajectories (`counters.audit`)."""

    question = True


class Requeue(ReplayRequest, frozen=True):
    """Try a dead letter (a failed attempt) again."""

    ticket: Name


class Discard(ReplayRequest, frozen=True):
    """Delete a dead letter."""

    ticket: Name


class SkipPlan(ReplayRequest, frozen=True):
    """Have the step of a recorded plan train nothing."""

    step: Whole
    reason: Annotated[str, Meta(pattern=r"\S", max_length=2 * MAX_REASON_CHARS)]


class LeasedTask(Struct, frozen=True):
    """One leased trajectory in a reply. The frame of the trajectory follows.

    - `task`: the task of the trajectory. In a group that was leased whole, only the first member has it.
    - `kinds`: the kinds of scores to give.
    - `final`: true if these are the last kinds that the trajectory needs.
    - `partial`: true if the frame of the trajectory's earlier labels follows, too.
    """

    task: Task | None
    kinds: tuple[str, ...]
    final: bool
    partial: bool
