"""The messages of the replay's protocol: encodes requests and replies as frames, and decodes them.

A message is a header frame in msgpack, `[PROTOCOL, kind, sequence, body, run]`, and raw frames with trajectories and
labels in the encoding of `wire`. In a request, `kind` is the name of the struct, `body` the struct, and `run` the run
of the client. In a reply, `kind` is one of REPLIES. `sequence` pairs a reply with its request.

A struct is checked once, when it is decoded, so that later code can rely on the types and limits of its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import WireError
from asyncrl.msgpack_values import UNREADABLE, check_keys, decoder, pack
from asyncrl.replay.protocol import Configure, GetTickets, LeasedTask, RenewLease, ReplayRequest, WorkerRequest
from asyncrl.text import cut
from asyncrl.types import BatchPlan, RunIdentity, Task, Ticket
from asyncrl.wire import MAX_HEADER_BYTES, MAX_LARGE_HEADER_BYTES, MAX_REASON_CHARS, PROTOCOL, Buffer

T = TypeVar("T")
REPLIES = ("ok", "nothing", "over", "busy", "refused", "ended", "solved")
OK, NOTHING, OVER, BUSY, REFUSED, ENDED, SOLVED = REPLIES
"""The outcomes of a request. For busy, refused, ended and solved, the body of the reply is the reason.

- ok: the request is done.
- nothing: there is nothing to give yet.
- over: the run is done.
- busy: the client must send the request again later.
- refused: the request had no effect.
- ended: the run must end, since too many trajectories failed, or too many groups were filtered out.
- solved: the run must end, since the policy solves its tasks.
"""
MAX_FRAMES = 8192


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
    """The frames of a BUSY, REFUSED, ENDED or SOLVED reply. A long reason is cut."""
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
    if kind is Configure:  # The only request with values of any type.
        try:
            check_keys(header.body)
        except UNREADABLE as error:
            raise WireError(str(error)) from error
    return _decoded(decoder, header.body)


def _decoded(decoder: Decoder[T], packed: Buffer | msgspec.Raw) -> T:
    try:
        return decoder.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from error
