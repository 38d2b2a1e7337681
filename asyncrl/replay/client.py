"""The client of the replay: what actors, scorers, learner ranks and people ask of it.

A call waits until the replay has answered, however often the replay is restarted meanwhile: requests are harmless to
repeat. A client is for one thread; make another one for another thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import zmq
from msgspec import structs

from asyncrl.errors import RefusedError, StoppedError, UnavailableError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import Watch, connect
from asyncrl.replay.requests import MAX_FETCH
from asyncrl.types import BatchPlan, Labels, Lease, RunIdentity, Ticket, Trajectory
from asyncrl.wire import (
    MAX_LARGE_HEADER_BYTES,
    Buffer,
    Message,
    decode,
    encode,
    labels_message,
    read_labels,
    read_plan,
    read_task,
    read_ticket,
    read_trajectory,
    run_field,
    split,
    trajectory_message,
)

log = logging.getLogger(__name__)

RETRY_S = 5.0
BREAK_S = 0.1
"""The wait after a connection that broke, doubled for every further one without an answer, up to RETRY_S."""
POLL_MS = 100
CREDITS = 32
CREDIT_BYTES = 2 << 20
"""Requests that one client has under way at once: so many, and of so many bytes, but always one."""
FETCH_CREDITS = 4
"""The same for requests whose replies are large."""


class _Obstacle(Enum):
    """Why requests must be sent again."""

    BUSY = auto()
    SILENT = auto()
    BROKEN = auto()


class ReplayClient:
    """One connection of `worker` to the replay at `endpoint`.

    `incarnation` tells one start of a worker from the next: what an older one held is given to others. `stop` ends
    waits with StoppedError. `give_up_s`, where set, ends them with UnavailableError. `keys` are those of network.keys.
    `run` goes with every request, and the replay of another one refuses it; without it only questions are answered.
    """

    def __init__(
        self,
        endpoint: str,
        worker: str,
        incarnation: str,
        stop: threading.Event | None = None,
        give_up_s: float | None = None,
        context: zmq.Context[Any] | None = None,
        keys: ClientKeys | None = None,
        run: RunIdentity | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._worker = worker
        self._incarnation = incarnation
        self._stop = stop or threading.Event()
        self._give_up_s = give_up_s
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self._own_run = run_field(run)
        self._sequence = 0
        self._break_s = BREAK_S
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = connect(self._context, self._endpoint, self._keys)
        self._watch = Watch(self._socket)

    def close(self) -> None:
        self._watch.close()
        self._socket.close()

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
        """Up to `want` tickets; waits about a second for the first. `holding` are those that this client has, `waiting`
        those of them whose episodes do not run: they wait for a version, or for their delivery."""
        reply = self._call("tickets", **self._who(), holding=list(holding), waiting=list(waiting), want=want)
        return [read_ticket(body) for body in reply.body.get("tickets", [])]

    def put(self, trajectory: Trajectory) -> str:
        """Deliver a trajectory; returns once it is durable: stored, duplicate, or late (counted, not kept)."""
        return self.put_all([trajectory])[0]

    def put_all(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Deliver several with one wait; what became of each, as `put` says. Raises RefusedError for the first that was
        refused, when the others are durable."""
        replies = self._send_all([trajectory_message(each) for each in trajectories])
        return [str(reply.body["result"]) for reply in replies]

    def fail(self, ticket_id: str, reason: str) -> None:
        """Give an episode up, with the reason."""
        self._call("failed", ticket=ticket_id, reason=reason)

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int) -> list[Lease]:
        """Trajectories that need scores of the kinds in `serves`, bounded by number and tokens; waits about a second
        for the first."""
        reply = self._call("lease", **self._who(), serves=list(serves), trajectories=trajectories, tokens=tokens)
        messages = iter(_messages(reply))
        return [
            Lease(
                read_task(task),
                read_trajectory(next(messages)),
                tuple(kinds),
                read_labels(next(messages)) if has_partial else None,
                final,
            )
            for task, kinds, final, has_partial in reply.body.get("leases", [])
        ]

    def renew(self) -> None:
        """Keep what this scorer leased for another while."""
        self._call("renew", **self._who())

    def label(self, labels: Sequence[Labels]) -> None:
        """Deliver labels; returns once all are durable. Raises RefusedError for the first that was refused, when the
        others are."""
        messages = [labels_message(each) for each in labels]
        self._send_all([Message(each.kind, 0, {**each.body, **self._who()}, each.arrays) for each in messages])

    def scoring_failed(self, trajectory_id: str, reason: str) -> None:
        """Give the scoring of a trajectory up for now, with the reason."""
        self._call("scoring-failed", **self._who(), id=trajectory_id, reason=reason)

    def plan(self, step: int) -> BatchPlan | None:
        """The plan of a learner step; waits about a second for it, then None."""
        reply = self._call("plan", step=step)
        return read_plan(reply.body["plan"]) if reply.body else None

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Trajectories, in the order of `ids`. Raises RefusedError: one is gone."""
        return [read_trajectory(message) for reply in self._fetch("data", ids) for message in _messages(reply)]

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """Labels of trajectories, in the order of `ids`. Raises RefusedError: one is gone."""
        return [read_labels(message) for reply in self._fetch("labels", ids) for message in _messages(reply)]

    def _fetch(self, table: str, ids: Sequence[str]) -> list[Message]:
        batches = [list(ids[start : start + MAX_FETCH]) for start in range(0, len(ids), MAX_FETCH)]
        return self._send_all([Message("fetch", 0, {"table": table, "ids": batch}) for batch in batches], FETCH_CREDITS)

    def published(self, version: int) -> None:
        """The learner has published `version`."""
        self._call("published", version=version)

    def checkpointed(self, steps: int, kept: int) -> None:
        """A checkpoint covers the first `steps` steps, and every one that may yet be resumed from the first `kept`:
        trajectories of these may be forgotten. Raises RefusedError: so many steps were never planned."""
        self._call("checkpointed", steps=steps, kept=kept)

    def evaluate(self, version: int) -> None:
        """Have the held-out tasks run greedily with `version` or newer; asking twice does nothing more."""
        self._call("evaluate", version=version)

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """The result of an evaluation: accuracy, mean_reward, count, failed; tokens, those of newer versions
        (newer_tokens) and newest_version. None while it is not complete; `wait` waits about a second before it says
        so."""
        return self._call("evaluation", version=version, wait=wait).body.get("result")

    def status(self) -> dict[str, Any]:
        """Counters and depths."""
        return dict(self._call("status").body["status"])

    def requeue(self, ticket: str) -> str:
        """Put a dead letter back; says how: scoring or task. Raises RefusedError."""
        return str(self._call("requeue", ticket=ticket).body["back"])

    def discard(self, ticket: str) -> None:
        """Forget a dead letter with its episode. Raises RefusedError."""
        self._call("discard", ticket=ticket)

    def skip_plan(self, step: int, reason: str) -> int:
        """Have a recorded plan's step train nothing; how many trajectories died with it. Raises RefusedError."""
        return int(self._call("skip-plan", step=step, reason=reason).body["dead"])

    def audit(self) -> dict[str, Any]:
        """Every accepted trajectory by state; what is lost or planned twice."""
        return dict(self._call("audit").body["audit"])

    def _who(self) -> dict[str, str]:
        return {"worker": self._worker, "incarnation": self._incarnation}

    def _call(self, kind: str, **body: Any) -> Message:
        return self._send_all([Message(kind, 0, body)])[0]

    def _send_all(self, messages: Sequence[Message], credits: int = CREDITS) -> list[Message]:
        """The replies to `messages`, up to `credits` of them under way at once; each is sent until it is answered.

        Raises RefusedError with the replay's first reason, once all are answered; WireError: one cannot be encoded, and
        none was sent.
        """
        first, self._sequence = self._sequence + 1, self._sequence + len(messages)
        frames = {
            number: encode(structs.replace(each, sequence=number, content={**each.body, **self._own_run}))
            for number, each in enumerate(messages, first)
        }
        replies: dict[int, Message] = {}
        started = time.monotonic()
        while len(replies) < len(messages):
            rest = {number: each for number, each in frames.items() if number not in replies}
            obstacle = self._exchange(rest, credits, replies, started)
            if obstacle is not None:
                self._pause(obstacle, time.monotonic() - started)
        for number, message in zip(frames, messages, strict=True):
            if replies[number].kind == "refused":
                raise RefusedError(f"the replay refused {message.kind}: {replies[number].body.get('reason')}")
        return [replies[number] for number in frames]

    def _exchange(
        self, requests: Mapping[int, list[Buffer]], credits: int, replies: dict[int, Message], started: float
    ) -> _Obstacle | None:
        """Send requests as credits allow and take replies; what is in the way where the rest must be sent again."""
        unsent, away = deque(requests.items()), dict[int, int]()
        self._watch.broke()
        deadline = time.monotonic() + RETRY_S
        while unsent or away:
            while unsent and _credit(away, credits):
                number, frames = unsent.popleft()
                self._socket.send_multipart(frames, copy=False)
                away[number] = sum(map(len, frames))
            if time.monotonic() > deadline:
                return _Obstacle.SILENT
            reply = self._receive(started)
            if reply is None and self._watch.broke():
                return _Obstacle.BROKEN
            if reply is None or reply.sequence not in away.keys() | {0}:
                continue
            if reply.kind == "busy":
                log.warning("the replay is busy: %s; asking again", reply.body.get("reason"))
                return _Obstacle.BUSY
            if reply.sequence == 0:
                raise RefusedError(f"the replay refused: {reply.body.get('reason')}")
            deadline = time.monotonic() + RETRY_S
            self._break_s = BREAK_S
            replies[reply.sequence] = reply
            del away[reply.sequence]
        return None

    def _receive(self, started: float) -> Message | None:
        """The next message, or None if there is none for a moment."""
        if self._stop.is_set():
            raise StoppedError("stopped while waiting for the replay")
        if self._give_up_s is not None and time.monotonic() - started > self._give_up_s:
            raise UnavailableError(f"no answer from the replay at {self._endpoint} within {self._give_up_s:.0f} s")
        if not self._socket.poll(POLL_MS):
            return None
        return decode([frame.buffer for frame in self._socket.recv_multipart(copy=False)], MAX_LARGE_HEADER_BYTES)

    def _pause(self, obstacle: _Obstacle, waited: float) -> None:
        """Before requests are sent again: over a fresh connection, since the old one may lead nowhere."""
        if obstacle is _Obstacle.BUSY:
            self._stop.wait(RETRY_S)
            return
        advice = f"; {CHECK_KEYS}" if self._keys else ""
        log.warning("%s waits for the replay at %s since %.0f s%s", self._worker, self._endpoint, waited, advice)
        if obstacle is _Obstacle.BROKEN:
            self._stop.wait(self._break_s)
            self._break_s = min(RETRY_S, 2 * self._break_s)
        self.close()
        self._connect()


def _messages(reply: Message) -> list[Message]:
    return [decode(split(reply.arrays[str(index)].data)) for index in range(len(reply.arrays))]


def _credit(away: Mapping[int, int], credits: int) -> bool:
    """Whether one more request may leave beside those that are `away`, by number and bytes."""
    return not away or (len(away) < credits and sum(away.values()) < CREDIT_BYTES)
