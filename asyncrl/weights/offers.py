"""Who waits for weights and who is in transfer: the publisher's whole protocol without a socket or a clock.

A receiver asks for `manifest` with the version it `holds`, and is answered as soon as there is a newer one, or with
`nothing` after `POLL_S`. Then it asks for each `chunk` by version, tensor and byte range. What holds:

- A transfer is served to its end from the version that it began with, whatever is offered meanwhile. Memory holds the
  newest version and those in transfer; a receiver silent for `forget_s` counts as dead.
- An offered version is only ever followed by a newer one.
- What is malformed or not there raises WireError, and changes nothing for anybody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.errors import WireError
from asyncrl.weights.manifest import Snapshot
from asyncrl.wire import Message

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: int
    holds: int
    deadline: float


@dataclass(slots=True)
class _Transfer:
    snapshot: Snapshot
    heard: float


class Offers:
    """The newest snapshot, and what every receiver is doing. `now` is a monotonic time in seconds."""

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._newest: Snapshot | None = None
        self._waiting: dict[bytes, _Waiting] = {}
        self._transfers: dict[bytes, _Transfer] = {}

    @property
    def newest(self) -> int:
        """The newest version on offer; -1 before the first."""
        return self._newest.manifest.version if self._newest else -1

    @property
    def kept(self) -> set[int]:
        """The versions in memory."""
        versions = {transfer.snapshot.manifest.version for transfer in self._transfers.values()}
        return versions | {self.newest} if self._newest else versions

    def offer(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the newest; one that is not newer is ignored."""
        if snapshot.manifest.version > self.newest:
            self._newest = snapshot

    def handle(self, receiver: bytes, request: Message, now: float) -> Message | None:
        """The reply to a request, or None where it comes later from `due`. Raises WireError."""
        match request.kind, request.body:
            case "manifest", {"holds": int(holds)}:
                self._transfers.pop(receiver, None)
                self._waiting[receiver] = _Waiting(request.sequence, holds, now + POLL_S)
                return None
            case "chunk", {"version": int(version), "tensor": int(tensor), "start": int(start), "stop": int(stop)}:
                transfer = self._transfers.get(receiver)
                if transfer is None or transfer.snapshot.manifest.version != version:
                    raise WireError(f"version {version} is not in transfer to this receiver; ask for the manifest")
                transfer.heard = now
                return _chunk(transfer.snapshot, tensor, start, stop, request.sequence)
        raise WireError(f"a receiver may ask for `manifest` or `chunk`, not {request.kind!r:.50} with that body")

    def due(self, now: float) -> Iterator[tuple[bytes, Message]]:
        """The replies for which waiting is over; also forgets the receivers that fell silent."""
        silent = [receiver for receiver, transfer in self._transfers.items() if now - transfer.heard > self._forget_s]
        for receiver in silent:
            del self._transfers[receiver]
        for receiver, waiting in list(self._waiting.items()):
            if self._newest and self.newest > waiting.holds:
                self._transfers[receiver] = _Transfer(self._newest, now)
                reply = Message("manifest", waiting.sequence, self._newest.manifest.body())
            elif now >= waiting.deadline:
                reply = Message("nothing", waiting.sequence)
            else:
                continue
            del self._waiting[receiver]
            yield receiver, reply


def _chunk(snapshot: Snapshot, tensor: int, start: int, stop: int, sequence: int) -> Message:
    manifest = snapshot.manifest
    if not (
        0 <= tensor < len(snapshot.buffers)
        and 0 <= start < stop <= len(snapshot.buffers[tensor])
        and stop - start <= manifest.chunk_bytes
    ):
        raise WireError(f"version {manifest.version} has no chunk [{start}, {stop}) of tensor {tensor}")
    return Message("chunk", sequence, {}, {"bytes": snapshot.buffers[tensor][start:stop]})
