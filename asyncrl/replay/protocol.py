"""The replay's protocol. Client and server share a struct for each kind of request, and raw frames may follow the
struct.

A message is a header frame in msgpack, `[PROTOCOL, kind, sequence, body, run]`, and raw frames with trajectories and
labels in the encoding of `wire`. In a request, `kind` is the name of the struct, `body` the struct, and `run` the run
of the client. In a reply, `kind` is one of REPLIES. `sequence` pairs a reply with its request.

Requests refer to objects by id. So a request that is repeated after a lost reply takes effect only once. A struct is
checked once, when it is decoded, so that later code can rely on the types and limits of its fields.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import WireError
from asyncrl.text import cut
from asyncrl.types import DIGEST_BYTES, BatchPlan, LabelNeeds, RunIdentity, Task, Ticket
from asyncrl.wire import MAX_HEADER_BYTES, MAX_LARGE_HEADER_BYTES, MAX_REASON_CHARS, PROTOCOL, Buffer, decoder, pack

T = TypeVar("T")

OK, NOTHING, OVER, BUSY, REFUSED, ENDED = REPLIES = ("ok", "nothing", "over", "busy", "refused", "ended")
"""The outcomes of a request. For busy, refused and ended, the body of the reply is the reason.

- ok: the request is done.
- nothing: there is nothing to give yet.
- over: the run is done.
- busy: the client must send the request again later.
- refused: the request had no effect.
- ended: the run must end because of too many failures.
"""
MAX_FRAMES = 8192
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
    seconds since 1970."""

    values: Annotated[dict[str, Any], Meta(min_length=1)]
    time: Whole


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


class _Header(Struct, frozen=True, array_like=True):
    protocol: int
    kind: str
    sequence: int
    body: msgspec.Raw
    run: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))


@dataclass(frozen=True, slots=True)
class Call:
    """A received request. If the message is malformed, `request` is a WireError with the reason. If the header is
    malformed, `kind` is empty and `sequence` is 0."""

    kind: str
    sequence: int
    request: ReplayRequest | WireError
    run: RunIdentity | None = None
    frames: Sequence[Buffer] = ()

    @property
    def renews(self) -> bool:
        """True if the request only renews the lease of a worker."""
        request = self.request
        return isinstance(request, RenewLease) or (isinstance(request, GetTickets) and not request.want)


@dataclass(frozen=True, slots=True)
class Answer:
    """A received reply. `kind` is one of REPLIES, and `read` decodes the body."""

    kind: str
    sequence: int
    body: msgspec.Raw
    frames: Sequence[Buffer]

    def read(self, decoder: Decoder[T]) -> T:
        """The body, decoded by `decoder`. Raises WireError: the body has a different type."""
        return _decoded(decoder, self.body)

    @property
    def reason(self) -> str:
        """The reason why the request was refused or must wait."""
        return self.read(TEXT)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of the service: a body that msgspec encodes, and raw frames."""

    body: Any = None
    frames: Sequence[Buffer] = ()


NUMBER, SECONDS, TEXT = Decoder(int), Decoder(float), Decoder(str)
VALUES, RESULT = Decoder(dict[str, Any]), Decoder(dict[str, Any] | None)
PLAN, CHANGES = Decoder(BatchPlan | None), Decoder(list[ConfigChange])
TICKETS: Decoder[list[Ticket]] = decoder(list[Ticket])
LEASES: Decoder[list[LeasedTask]] = decoder(list[LeasedTask])
TASK: Decoder[Task | None] = decoder(Task | None)
_HEADER = Decoder(_Header)
_RUN = Decoder(RunIdentity | None)
_REQUESTS = {
    each.__name__: (each, Decoder(each))
    for base in (ReplayRequest, WorkerRequest)
    for each in base.__subclasses__()
    if each is not WorkerRequest
}
KINDS = tuple(_REQUESTS)


def encode_request(
    request: ReplayRequest, sequence: int, run: RunIdentity | None = None, frames: Sequence[Buffer] = ()
) -> list[Buffer]:
    """The frames of a request. Raises WireError: a value has no encoding, or the header is too large."""
    return [_header(request.kind, sequence, request, run, MAX_HEADER_BYTES), *frames]


def encode_reply(kind: str, sequence: int, reply: Reply) -> list[Buffer]:
    """The frames of a reply. Raises WireError: a value has no encoding, or the header is too large."""
    return [_header(kind, sequence, reply.body, None, MAX_LARGE_HEADER_BYTES), *reply.frames]


def encode_reason(kind: str, sequence: int, reason: str) -> list[Buffer]:
    """The frames of a BUSY, REFUSED or ENDED reply. A long reason is cut."""
    return encode_reply(kind, sequence, Reply(cut(reason, MAX_REASON_CHARS)))


def decode_request(frames: Sequence[Buffer]) -> Call:
    """The request in `frames`. A malformed message gives a Call with a WireError."""
    try:
        header = _read_header(frames, MAX_HEADER_BYTES)
    except WireError as error:
        return Call("", 0, error)
    try:
        request = _read_request(header, len(frames) - 1)
        return Call(header.kind, header.sequence, request, _decoded(_RUN, header.run), frames[1:])
    except WireError as error:
        return Call(header.kind, header.sequence, WireError(f"malformed request {header.kind!r:.50}: {error}"))


def decode_reply(frames: Sequence[Buffer]) -> Answer:
    """The reply in `frames`. Raises WireError: it is malformed."""
    header = _read_header(frames, MAX_LARGE_HEADER_BYTES)
    if header.kind not in REPLIES:
        raise WireError(f"unknown kind of reply {header.kind!r:.50}; known kinds are {', '.join(REPLIES)}")
    return Answer(header.kind, header.sequence, header.body, frames[1:])


def _header(kind: str, sequence: int, body: Any, run: RunIdentity | None, max_bytes: int) -> bytes:
    header = pack((PROTOCOL, kind, sequence, body, run), f"a message {kind}")
    if len(header) > max_bytes:
        raise WireError(f"a message {kind} cannot be sent: its header has {len(header)} bytes of at most {max_bytes}")
    return header


def _read_header(frames: Sequence[Buffer], max_bytes: int) -> _Header:
    if not 0 < len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    if len(frames[0]) > max_bytes:
        raise WireError(f"the header has {len(frames[0])} bytes; at most {max_bytes} are taken")
    try:
        header = _decoded(_HEADER, frames[0])
    except WireError as error:
        raise WireError(f"the header cannot be read: {error}") from error
    if header.protocol != PROTOCOL:
        raise WireError(
            f"the message speaks protocol {header.protocol}, this side speaks {PROTOCOL}; use one asyncrl version"
        )
    return header


def _read_request(header: _Header, frames: int) -> ReplayRequest:
    if header.kind not in _REQUESTS:
        raise WireError(f"unknown kind of request; known kinds are {', '.join(KINDS)}")
    kind, decoder = _REQUESTS[header.kind]
    if frames and not kind.frames:
        raise WireError(f"this kind of request has no frames, but {frames} came")
    return _decoded(decoder, header.body)


def _decoded(decoder: Decoder[T], packed: Buffer | msgspec.Raw) -> T:
    try:
        return decoder.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from error
