"""Which receivers wait for weights or are in transfer: the weight server's protocol without a socket or a clock.

A receiver asks for `manifest` with the version it `holds` and the digest of the weights it has as a `base` for deltas
(empty for none). It is answered once there is a newer version, or with `nothing` after `POLL_S`. Then it asks for
`chunks` of the version by part and byte range. The parts are the payloads of the deltas that came with the manifest, or
the tensors if no delta came. A request may name several small chunks, because a request costs as much time as 200 kB.

To take part in a broadcast, a receiver asks to `join` with the version it `holds`, its `backend` and its `gpu`. The
answer is `broadcast` when one begins, `missed` if a newer version is on offer already, `nothing` after `POLL_S`, or
`excluded` with the reason if this receiver can never take part.

What holds:

- A transfer is served to its end from the version with which it began, whatever is offered meanwhile. Memory holds the
  newest version, deltas between the last few, and what is in transfer. A receiver that is silent for `forget_s` is
  forgotten.
- An offered version is only ever followed by a newer one.
- Deltas lead from the receiver's own base to the offered version, and are fewer bytes than the version.
- A malformed request, or one for chunks that do not exist, raises WireError and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.weights.delta import Bytes, Delta
from asyncrl.weights.manifest import MAX_TOGETHER, WeightSnapshot
from asyncrl.wire import Message

POLL_S = 1.0
JOINED_S = 2 * POLL_S


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: int
    holds: int
    base: str
    deadline: float
    backend: str = ""
    gpu: str = ""


@dataclass(slots=True)
class _Transfer:
    snapshot: WeightSnapshot
    parts: Sequence[Bytes]
    heard: float


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """How the learner broadcasts: over a backend of torch, from the GPU with that uuid ("" for the CPU)."""

    backend: str
    gpu: str

    def obstacle(self, backend: str, gpu: str) -> str:
        """Why a receiver can never take part; "" if it can."""
        if backend != self.backend:
            return f"the learner broadcasts by {self.backend}, and this engine could take part by {backend}"
        return "the learner is on the same GPU" if gpu and gpu == self.gpu else ""


class Transfers:
    """The newest snapshot, the last `history` deltas, and what every receiver is doing.

    `broadcasts` is None for a learner that broadcasts nothing. `now` is a monotonic time in seconds.
    """

    def __init__(self, forget_s: float, history: int = 0, broadcasts: Broadcasts | None = None) -> None:
        self._forget_s = forget_s
        self._broadcasts = broadcasts
        self._deltas: deque[Delta] = deque(maxlen=history)
        self._newest: WeightSnapshot | None = None
        self._waiting: dict[bytes, _Waiting] = {}
        self._transfers: dict[bytes, _Transfer] = {}
        self._joined: dict[bytes, tuple[str, float]] = {}

    @property
    def newest(self) -> int:
        """The newest version on offer; -1 before the first."""
        return self._newest.manifest.version if self._newest else -1

    @property
    def kept(self) -> set[int]:
        """The versions in memory."""
        versions = {transfer.snapshot.manifest.version for transfer in self._transfers.values()}
        return versions | {self.newest} if self._newest else versions

    def offer(self, snapshot: WeightSnapshot, delta: Delta | None = None) -> None:
        """Make `snapshot` the newest; one that is not newer is ignored. `delta` leads to it from the one before; one
        that is no smaller than the version is of no use to anybody, and is not kept."""
        if snapshot.manifest.version > self.newest:
            self._newest = snapshot
            if delta is None or len(delta.payload) >= snapshot.manifest.nbytes:
                self._deltas.clear()
            else:
                self._deltas.append(delta)

    def handle(self, receiver: bytes, request: Message, now: float) -> Message | None:
        """The reply to a request, or None where it comes later from `due`. Raises WireError."""
        match request.kind, request.body:
            case "manifest", {"holds": int(holds), "base": str(base)}:
                self._transfers.pop(receiver, None)
                self._waiting[receiver] = _Waiting(request.sequence, holds, base, now + POLL_S)
                return None
            case "join", {"holds": int(holds), "backend": str(backend), "gpu": str(gpu)} if backend:
                if reason := self._obstacle(backend, gpu):
                    return Message("excluded", request.sequence, {"reason": reason})
                self._waiting[receiver] = _Waiting(request.sequence, holds, "", now + POLL_S, backend, gpu)
                self._joined[receiver] = (backend, now)
                return None
            case "chunks", {"version": int(version), "chunks": list(rows)} if 0 < len(rows) <= MAX_TOGETHER:
                transfer = self._transfers.get(receiver)
                if transfer is None or transfer.snapshot.manifest.version != version:
                    raise WireError(f"version {version} is not in transfer to this receiver; ask for the manifest")
                transfer.heard = now
                return _chunks(transfer, rows, request.sequence)
        raise WireError(
            f"a receiver may ask for `manifest`, `chunks` or `join`, not {request.kind!r:.50} with that body"
        )

    def due(self, now: float) -> Iterator[tuple[bytes, Message]]:
        """The replies for which waiting is over; also forgets the receivers that fell silent."""
        silent = [receiver for receiver, transfer in self._transfers.items() if now - transfer.heard > self._forget_s]
        for receiver in silent:
            del self._transfers[receiver]
        for receiver, waiting in list(self._waiting.items()):
            if self._newest and self.newest > waiting.holds:
                missed = Message("missed", waiting.sequence)
                reply = missed if waiting.backend else self._begin(receiver, self._newest, waiting, now)
            elif now >= waiting.deadline:
                reply = Message("nothing", waiting.sequence)
            else:
                continue
            del self._waiting[receiver]
            yield receiver, reply

    def joining(self, backend: str) -> tuple[bytes, ...]:
        """The receivers that wait for a broadcast over `backend`, in a fixed order, and no two of one GPU."""
        waiting = sorted((receiver, each) for receiver, each in self._waiting.items() if each.backend == backend)
        first = {each.gpu or receiver: receiver for receiver, each in reversed(waiting)}
        return tuple(sorted(first.values()))

    def absent(self, backend: str, now: float) -> bool:
        """Whether a receiver that asked to join over `backend` a moment ago is between two requests."""
        self._joined = {receiver: last for receiver, last in self._joined.items() if now - last[1] < JOINED_S}
        lately = {receiver for receiver, (own, _) in self._joined.items() if own == backend}
        return bool(lately - set(self.joining(backend)))

    def call(self, receivers: Sequence[bytes], body: Mapping[str, Any]) -> Iterator[tuple[bytes, Message]]:
        """The calls of joining `receivers` to a broadcast; each gets `body` with its rank and their number."""
        for index, receiver in enumerate(receivers):
            place = {"rank": index + 1, "size": len(receivers) + 1}
            yield receiver, Message("broadcast", self._waiting.pop(receiver).sequence, {**body, **place})

    def _obstacle(self, backend: str, gpu: str) -> str:
        return self._broadcasts.obstacle(backend, gpu) if self._broadcasts else "the learner broadcasts nothing"

    def _begin(self, receiver: bytes, newest: WeightSnapshot, waiting: _Waiting, now: float) -> Message:
        chain = self._chain(waiting.base)
        if sum(len(delta.payload) for delta in chain) >= newest.manifest.nbytes:
            chain = []
        parts = [delta.payload for delta in chain] or newest.buffers
        self._transfers[receiver] = _Transfer(newest, parts, now)
        headers = [delta.header.body() for delta in chain]
        return Message("manifest", waiting.sequence, {**newest.manifest.body(), "deltas": headers})

    def _chain(self, base: str) -> list[Delta]:
        """The deltas from `base` to the newest version, or none."""
        bases = [delta.header.base for delta in self._deltas]
        return list(self._deltas)[bases.index(base) :] if base in bases else []


def _chunks(transfer: _Transfer, rows: Sequence[Any], sequence: int) -> Message:
    manifest, found = transfer.snapshot.manifest, []
    for row in rows:
        match row:
            case [int(part), int(start), int(stop)] if 0 <= part < len(transfer.parts):
                if 0 <= start < stop <= len(transfer.parts[part]):
                    found.append(transfer.parts[part][start:stop])
                    continue
        raise WireError(f"version {manifest.version} has no chunk {row!r:.100}")
    if sum(map(len, found)) > manifest.chunk_bytes:
        raise WireError(f"version {manifest.version} is given out in at most {manifest.chunk_bytes} bytes at once")
    return Message("chunks", sequence, {}, {str(index): data for index, data in enumerate(found)})
