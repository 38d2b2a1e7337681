"""The replay's protocol: one struct a request, which client and server share, and raw frames after it.

A message is a header frame in msgpack, `[PROTOCOL, kind, sequence, body, run]`, followed by raw frames: trajectories
and labels as `wire` encodes them. The header of a request has the name of its struct as kind, the struct as body, and
the run of the client. The header of a reply has one of REPLIES as kind. `sequence` pairs a reply with its request.

Every request names what it is about by ids, so that it takes effect exactly once, although it may come again after a
lost reply. A struct is checked once, when it is decoded: an object that exists holds what its fields say.
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
"""The outcome of a request: done; nothing to give yet; nothing left to give, since the run is done; send it again
later; refused; too many failures, so the run must end. The body of the last three is the reason.
"""
MAX_FRAMES = 8192
MAX_FETCH = 16

Name = Annotated[str, Meta(min_length=1, max_length=120)]
"""An id or a worker's name. In UTF-8 it has at most 480 bytes, so that it fits into a key of the store."""
Names = Annotated[list[Name], Meta(max_length=1 << 16)]
Score = Annotated[str, Meta(min_length=1, max_length=1000)]
"""The name of a score."""
Whole = Annotated[int, Meta(ge=0, le=1 << 62)]
Version = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Reason = Annotated[str, Meta(max_length=2 * MAX_REASON_CHARS)]


class ReplayRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all requests. Anybody may ask a `question`; everything else must come from the run that is served.
    With `frames` the request has raw frames, else it has none."""

    question: ClassVar[bool] = False
    frames: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return type(self).__name__

    def queue(self) -> Hashable:
        """The queue in which the request waits. Requests of one queue wait for the same, so one tells for all."""
        return self


class WorkerRequest(ReplayRequest, frozen=True):
    """A request of one worker. `incarnation` tells one start of the worker from the next."""

    worker: Name
    incarnation: Name


class GetTickets(WorkerRequest, frozen=True):
    """Up to `want` tickets for an actor that holds `holding`; the episodes of those in `waiting` do not run now."""

    holding: Names
    waiting: Names
    want: Whole

    def queue(self) -> Hashable:
        return self.kind


class Leave(WorkerRequest, frozen=True):
    """End this start of a worker. It takes no further work, and the work that it holds goes to others at once."""


class PutTrajectory(ReplayRequest, frozen=True):
    """Store the trajectory in the frames, of which the last `images` are images that it shows."""

    images: Whole
    frames = True


class FailEpisode(ReplayRequest, frozen=True):
    """Give the episode of a ticket up."""

    ticket: Name
    reason: Reason


class LeaseTrajectories(WorkerRequest, frozen=True):
    """Trajectories that need scores of the kinds in `serves`, bounded by number and tokens; or up to `groups` whole
    groups, for the kind that scores these."""

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
    """Store the labels of all members of a group that was leased whole: all, or none. Each frame has the labels of one
    member, as the store keeps them."""

    frames = True


class FailScoring(WorkerRequest, frozen=True):
    """Give the scoring of a leased trajectory up for now, and that of its group where it was leased whole."""

    id: Name
    reason: Reason


class Configure(ReplayRequest, frozen=True):
    """The learner uses these values of all keys of the configuration from `time`, in seconds since 1970."""

    values: Annotated[dict[str, Any], Meta(min_length=1)]
    time: Whole


class RequireLabels(ReplayRequest, frozen=True):
    """Plan only episodes whose labels have these scores, from step `first` on, and with `unit_steps` only step scores
    in [-1, 1]."""

    first: Whole
    scores: Annotated[list[Score], Meta(max_length=1024)]
    unit_steps: bool

    @property
    def needs(self) -> LabelNeeds:
        return LabelNeeds(tuple(self.scores), self.unit_steps)


class GetPlan(ReplayRequest, frozen=True):
    """The batch plan of a learner step. With `ahead` the learner is not there yet, and the reply is none where a later
    request could get another plan."""

    step: Whole
    ahead: bool


class Fetch(ReplayRequest, frozen=True):
    """The stored frames of trajectories or of their labels."""

    table: Literal["data", "labels"]
    ids: Annotated[list[Name], Meta(max_length=MAX_FETCH)]


class FetchImage(ReplayRequest, frozen=True):
    """The stored bytes of an image that a trajectory shows, by their SHA-256."""

    id: Name
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class GetTask(ReplayRequest, frozen=True):
    """The task of which a trajectory is an episode; none where it is not known."""

    id: Name


class Published(ReplayRequest, frozen=True):
    """The learner has published a policy version."""

    version: Version


class Checkpointed(ReplayRequest, frozen=True):
    """A checkpoint covers the first `steps` steps; every checkpoint that is kept covers the first `kept`."""

    steps: Whole
    kept: Whole


class Evaluate(ReplayRequest, frozen=True):
    """Run the held-out tasks with `version` or newer."""

    version: Version


class GetEvaluation(ReplayRequest, frozen=True):
    """The result of an evaluation; with `wait` the reply may take until it is complete."""

    version: Version
    wait: bool


class Finished(ReplayRequest, frozen=True):
    """The learner has done the last step of the run."""


class GetStatus(ReplayRequest, frozen=True):
    """Counters and depths."""

    question = True


class GetClock(ReplayRequest, frozen=True):
    """The time of the replay's clock of spans, in seconds since 1970; it is answered at once."""

    question = True


class GetAudit(ReplayRequest, frozen=True):
    """Every accepted trajectory by state."""

    question = True


class Requeue(ReplayRequest, frozen=True):
    """Put a dead letter back."""

    ticket: Name


class Discard(ReplayRequest, frozen=True):
    """Forget a dead letter."""

    ticket: Name


class SkipPlan(ReplayRequest, frozen=True):
    """Have a recorded step train nothing."""

    step: Whole
    reason: Annotated[str, Meta(pattern=r"\S", max_length=2 * MAX_REASON_CHARS)]


class LeasedTask(Struct, frozen=True):
    """One leased trajectory in a reply. Its frame follows, and with `partial` the frame of its labels so far. Without a
    `task` it has the task of the trajectory before it, which is of the same group that was leased whole."""

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
    """A request as it arrived. `request` is a WireError with the reason where the message is malformed; `kind` and
    `sequence` are empty where the header is."""

    kind: str
    sequence: int
    request: ReplayRequest | WireError
    run: RunIdentity | None = None
    frames: Sequence[Buffer] = ()

    @property
    def renews(self) -> bool:
        """True if the request does no more than renew the lease of a worker."""
        request = self.request
        return isinstance(request, RenewLease) or (isinstance(request, GetTickets) and not request.want)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as it arrived: `kind` is one of REPLIES, and `read` decodes the body."""

    kind: str
    sequence: int
    body: msgspec.Raw
    frames: Sequence[Buffer]

    def read(self, decoder: Decoder[T]) -> T:
        """The body as `decoder` types it. Raises WireError: it is something else."""
        return _decoded(decoder, self.body)

    @property
    def reason(self) -> str:
        """Why the request was refused or must wait."""
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
    """The frames of a reply that is BUSY, REFUSED or ENDED; a long reason is cut."""
    return encode_reply(kind, sequence, Reply(cut(reason, MAX_REASON_CHARS)))


def decode_request(frames: Sequence[Buffer]) -> Call:
    """The request in `frames`; one that is malformed says why."""
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
        raise WireError(f"a reply of kind {header.kind!r:.50} is not known; known are {', '.join(REPLIES)}")
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
        raise WireError(f"no such request; known are {', '.join(KINDS)}")
    kind, decoder = _REQUESTS[header.kind]
    if frames and not kind.frames:
        raise WireError(f"it has no frames, but {frames} came")
    return _decoded(decoder, header.body)


def _decoded(decoder: Decoder[T], packed: Buffer | msgspec.Raw) -> T:
    try:
        return decoder.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from error
