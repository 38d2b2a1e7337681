"""The weight server's protocol, without a socket or a clock: which receivers wait for weights, and which get them now.

A receiver requests `manifest` with the version that it `holds`, and with `base`: the digest of the weights to which it
can apply deltas (empty if it has none). The answer comes once there is a newer version. If there is none within
`POLL_S`, the answer is `nothing`.

Then the receiver requests one `chunk` after another: a range of the bytes of the version. The bytes are the
concatenated payloads of the deltas that came with the manifest, or the tensors if no delta came. A receiver need not
request the bytes of tensors that it has.

To take part in a broadcast, a receiver asks to `join` with the version it `holds`, its `backend` and its `gpu`. The
answer is one of these:

- `broadcast` when one begins
- `missed` if a newer version is on offer already
- `nothing` after `POLL_S`
- `excluded`, with the reason, if this receiver can never take part in a broadcast

These rules hold:

- A transfer ends with the version with which it began, even if a newer one is offered meanwhile. Memory holds the
  newest version, deltas between the last few versions, and versions in transfer. A receiver that is silent for
  `forget_s` is forgotten.
- Each offered version is newer than the one before it.
- Deltas are offered only if they lead from the receiver's own base to the offered version, and have fewer bytes than
  the version.
- A malformed request, or one for chunks that do not exist, raises WireError and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Annotated

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.weights.delta import Bytes, Delta
from asyncrl.weights.group import BroadcastCall
from asyncrl.weights.manifest import Size, WeightSnapshot, places
from asyncrl.wire import Message

FEW_PARTS = 8
"""The maximum number of arrays in which a chunk is sent. Up to this number, sending the arrays costs less than copying
them into one."""
POLL_S = 1.0
JOINED_S = 2 * POLL_S


class _Follow(msgspec.Struct, frozen=True):
    holds: int
    base: str


class _Join(msgspec.Struct, frozen=True):
    holds: int
    backend: Annotated[str, msgspec.Meta(min_length=1)]
    gpu: str


class _Fetch(msgspec.Struct, frozen=True):
    version: int
    start: Size
    stop: Size


_FOLLOW = msgspec.msgpack.Decoder(_Follow)
_JOIN = msgspec.msgpack.Decoder(_Join)
_FETCH = msgspec.msgpack.Decoder(_Fetch)


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: int
    request: _Follow | _Join
    deadline: float


class _Transfer:
    """A transfer of the bytes of `parts` to a receiver, whose last request came at `heard`."""

    def __init__(self, snapshot: WeightSnapshot, parts: Sequence[Bytes], heard: float) -> None:
        self.snapshot = snapshot
        self.began = self.heard = heard
        self.sent = 0
        self._parts = parts
        self._edges = list(accumulate(map(len, parts), initial=0))

    def chunk(self, start: int, stop: int) -> list[Bytes]:
        """Return the bytes [start, stop). They are copied into one array if they lie in more than FEW_PARTS parts.
        Raises WireError: there are no such bytes."""
        manifest = self.snapshot.manifest
        if not start < stop <= self._edges[-1] or stop - start > manifest.chunk_bytes:
            raise WireError(
                f"a request is for the bytes from {start} to {stop} of version {manifest.version}, which has "
                f"{self._edges[-1]} bytes; a request may be for at most {manifest.chunk_bytes}"
            )
        self.sent += stop - start
        found = [self._parts[part][where] for part, where in places(self._edges, start, stop)]
        return found if len(found) <= FEW_PARTS else [np.concatenate(found)]


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """The learner broadcasts over a `backend` of torch, from the GPU with the uuid `gpu` ("" for the CPU)."""

    backend: str
    gpu: str

    def obstacle(self, backend: str, gpu: str) -> str:
        """Return the reason why a receiver with this `backend` and `gpu` can never take part, or "" if it can."""
        if backend != self.backend:
            return f"the learner broadcasts by {self.backend}, and this engine could take part by {backend}"
        return "the learner is on the same GPU" if gpu and gpu == self.gpu else ""


class Transfers:
    """Holds the newest snapshot, the last `history` deltas, and the state of every receiver.

    `broadcasts` is None for a learner that broadcasts nothing. `spans` records each transfer that has ended. `now` is
    always the time in seconds on the monotonic clock of `spans`.
    """

    def __init__(
        self,
        forget_s: float,
        history: int = 0,
        broadcasts: Broadcasts | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._forget_s = forget_s
        self._broadcasts = broadcasts
        self._spans = spans or NoSpans()
        self._deltas: deque[Delta] = deque(maxlen=history)
        self._newest: WeightSnapshot | None = None
        self._waiting: dict[bytes, _Waiting] = {}
        self._transfers: dict[bytes, _Transfer] = {}
        self._joined: dict[bytes, tuple[str, float]] = {}

    @property
    def newest(self) -> int:
        """The newest version on offer, or -1 before the first."""
        return self._newest.manifest.version if self._newest else -1

    @property
    def kept(self) -> set[int]:
        """The versions in memory."""
        versions = {transfer.snapshot.manifest.version for transfer in self._transfers.values()}
        return versions | {self.newest} if self._newest else versions

    def offer(self, snapshot: WeightSnapshot, delta: Delta | None = None) -> None:
        """Make `snapshot` the newest version, if it is newer than the one on offer. `delta` leads from the version
        before to this one. A delta is kept only if it is smaller than the version.
        """
        if snapshot.manifest.version > self.newest:
            self._newest = snapshot
            if delta is None or len(delta.payload) >= snapshot.manifest.nbytes:
                self._deltas.clear()
            else:
                self._deltas.append(delta)

    def handle(self, receiver: bytes, request: Message, now: float) -> Message | None:
        """Return the reply to a request, or None if `due` yields it later. Raises WireError: the request is malformed,
        or for chunks that do not exist."""
        match request.kind:
            case "manifest":
                self._waiting[receiver] = _Waiting(request.sequence, request.read(_FOLLOW), now + POLL_S)
                self._end(receiver)
                return None
            case "join":
                join = request.read(_JOIN)
                ours = self._broadcasts
                if reason := ours.obstacle(join.backend, join.gpu) if ours else "the learner broadcasts nothing":
                    return Message("excluded", request.sequence, {"reason": reason})
                self._waiting[receiver] = _Waiting(request.sequence, join, now + POLL_S)
                self._joined[receiver] = (join.backend, now)
                return None
            case "chunk":
                fetch, transfer = request.read(_FETCH), self._transfers.get(receiver)
                if transfer is None or transfer.snapshot.manifest.version != fetch.version:
                    raise WireError(
                        f"version {fetch.version} is not in transfer to this receiver; ask for the manifest"
                    )
                transfer.heard = now
                found = transfer.chunk(fetch.start, fetch.stop)
                return Message("chunk", request.sequence, {}, {str(index): data for index, data in enumerate(found)})
        raise WireError(f"a receiver may ask for `manifest`, `chunk` or `join`, not {request.kind!r:.50}")

    def due(self, now: float) -> Iterator[tuple[bytes, Message]]:
        """Yield the replies that are due now, and forget the receivers that fell silent."""
        silent = [receiver for receiver, transfer in self._transfers.items() if now - transfer.heard > self._forget_s]
        for receiver in silent:
            self._end(receiver)
        for receiver, waiting in list(self._waiting.items()):
            if self._newest and self.newest > waiting.request.holds:
                reply = self._begin(receiver, self._newest, waiting, now)
            elif now >= waiting.deadline:
                reply = Message("nothing", waiting.sequence)
            else:
                continue
            del self._waiting[receiver]
            yield receiver, reply

    def joining(self, backend: str) -> tuple[bytes, ...]:
        """Return the receivers that wait for a broadcast over `backend`, in a fixed order, at most one for each GPU."""
        first: dict[str | bytes, bytes] = {}
        for receiver, waiting in sorted(self._waiting.items(), key=itemgetter(0)):
            if isinstance(waiting.request, _Join) and waiting.request.backend == backend:
                first.setdefault(waiting.request.gpu or receiver, receiver)
        return tuple(sorted(first.values()))

    def absent(self, backend: str, now: float) -> bool:
        """True if a receiver that asked to join over `backend` a moment ago has not asked again yet."""
        self._joined = {receiver: last for receiver, last in self._joined.items() if now - last[1] < JOINED_S}
        lately = {receiver for receiver, (own, _) in self._joined.items() if own == backend}
        return bool(lately - {receiver for receiver, each in self._waiting.items() if isinstance(each.request, _Join)})

    def call(self, receivers: Sequence[bytes], call: BroadcastCall) -> Iterator[tuple[bytes, Message]]:
        """Yield `call` for each of the joining `receivers`, with the receiver's rank and the number of receivers."""
        for rank, receiver in enumerate(receivers, 1):
            own = msgspec.structs.replace(call, rank=rank, size=len(receivers) + 1)
            yield receiver, Message("broadcast", self._waiting.pop(receiver).sequence, own)

    def _begin(self, receiver: bytes, newest: WeightSnapshot, waiting: _Waiting, now: float) -> Message:
        if isinstance(waiting.request, _Join):
            return Message("missed", waiting.sequence)
        chain = self._chain(waiting.request.base)
        if sum(len(delta.payload) for delta in chain) >= newest.manifest.nbytes:
            chain = []
        self._transfers[receiver] = _Transfer(newest, [delta.payload for delta in chain] or newest.buffers, now)
        deltas = tuple(delta.header for delta in chain)
        return Message("manifest", waiting.sequence, msgspec.structs.replace(newest.manifest, deltas=deltas))

    def _end(self, receiver: bytes) -> None:
        transfer = self._transfers.pop(receiver, None)
        if transfer is not None:
            about = {"version": transfer.snapshot.manifest.version, "bytes": transfer.sent}
            self._spans.add("push", transfer.began, transfer.heard, f"engine {receiver.hex()}", **about)

    def _chain(self, base: str) -> list[Delta]:
        """Return the deltas from `base` to the newest version, or an empty list."""
        bases = [delta.header.base for delta in self._deltas]
        return list(self._deltas)[bases.index(base) :] if base in bases else []
