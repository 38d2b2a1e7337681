"""The client of the replay, for actors, scorers, learner ranks and people.

A call waits until the replay has answered, even if the replay restarts meanwhile. Requests are harmless to repeat, so
each takes effect exactly once. A client belongs to one thread; make one for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import zmq
from msgspec.msgpack import Decoder

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import (
    ConfigError,
    RefusedError,
    RunOverError,
    TooManyFailuresError,
    WireError,
)
from asyncrl.masking import masked_text
from asyncrl.network.keys import ClientKeys
from asyncrl.observe.spans import Spans
from asyncrl.replay import protocol
from asyncrl.replay.link import CREDITS, RETRY_S, ReplayLink, Request
from asyncrl.replay.protocol import (
    ENDED,
    MAX_FETCH,
    OK,
    OVER,
    REFUSED,
    Answer,
    ReplayRequest,
)
from asyncrl.text import cut
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Lease, RunIdentity, Task, Ticket, Trajectory
from asyncrl.wire import (
    MAX_REASON_CHARS,
    Buffer,
    Message,
    decode,
    encode,
    join,
    labels_message,
    read_labels,
    read_trajectory,
    split,
    trajectory_message,
)

T = TypeVar("T")
Outcome = str | RefusedError | WireError
"""The outcome of a delivery: stored, duplicate or late, or the error with which it was refused."""

INCOMPLETE = "incomplete"
FETCH_CREDITS = 4
"""The bound on the number of requests whose replies are large."""
RENEWALS_PER_LEASE = 4
"""The number of renewals in the time after which a silent worker would count as dead."""


class ReplayClient:
    """One connection of `worker` to the replay at `endpoint`.

    `incarnation` tells one start of a worker from the next; work of an older incarnation goes to others. `stop` ends
    waits with StoppedError. `give_up_s`, where set, ends them with UnavailableError. `keys` are those of network.keys.
    `run` is sent with every request, and the replay of another run refuses it; without `run` the replay answers only
    read requests. A request without an answer for `retry_s` is sent again. `spans` records how far the replay's clock
    is ahead.
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
        retry_s: float = RETRY_S,
        spans: Spans | None = None,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._link = ReplayLink(endpoint, worker, stop, give_up_s, context, keys, run, retry_s, spans)

    def close(self) -> None:
        self._link.close()

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
        """Up to `want` tickets; waits about a second for the first. `holding` names the tickets of this client.
        `waiting` names the ones whose episodes do not run, because they wait for a version or for delivery.
        """
        request = protocol.GetTickets(self._worker, self._incarnation, list(holding), list(waiting), want)
        return self._ask(request, protocol.TICKETS) or []

    def leave(self) -> None:
        """End this start of the worker: its work goes to others at once."""
        self._send(protocol.Leave(self._worker, self._incarnation))

    def put(self, trajectory: Trajectory, images: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
        """Deliver a trajectory; returns once it is durable: stored, duplicate, or late (counted, not kept). `images`
        has at least the images that it shows, by digest; they are sent if the replay lacks one of them. Raises
        RefusedError; WireError: it cannot be encoded.
        """
        [outcome] = self.put_all([trajectory], images)
        if isinstance(outcome, str):
            return outcome
        raise outcome

    def put_all(
        self, trajectories: Sequence[Trajectory], images: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> list[Outcome]:
        """Deliver several at once; returns when all are durable or refused. Each result is the one that `put` would
        return, or the error that it would raise.
        """
        outcomes: dict[int, Outcome] = {}
        rest = dict(enumerate(trajectories))
        while rest:
            bare = self._put_each(rest)
            incomplete = {at: rest[at] for at, outcome in bare.items() if outcome == INCOMPLETE}
            firsts = _first_to_show(incomplete)
            outcomes |= bare | self._put_each({at: incomplete.pop(at) for at in firsts}, images)
            rest = incomplete
        return [outcomes[at] for at in range(len(trajectories))]

    def _put_each(
        self, trajectories: Mapping[int, Trajectory], images: Mapping[bytes, bytes] | None = None
    ) -> dict[int, Outcome]:
        """Send each, with all that it shows if `images` are given. Returns the outcome of each."""
        outcomes: dict[int, Outcome] = {}
        requests = {}
        for at, trajectory in trajectories.items():
            shown = [] if images is None else [images[name] for name in dict.fromkeys(trajectory.image_names)]
            try:
                frames = [*encode(trajectory_message(trajectory)), *shown]
            except WireError as error:
                outcomes[at] = error
            else:
                requests[at] = (protocol.PutTrajectory(len(shown)), frames)
        for at, answer in zip(requests, self._link.answers(list(requests.values())), strict=True):
            try:
                outcomes[at] = _accepted(protocol.PutTrajectory.__name__, answer).read(protocol.TEXT)
            except (RefusedError, WireError) as error:
                outcomes[at] = error
        return outcomes

    def fail(self, ticket_id: str, reason: str) -> None:
        """Give an episode up, with the reason."""
        self.fail_all({ticket_id: reason})

    def fail_all(self, reasons: Mapping[str, str]) -> None:
        """Give several episodes up at once, each with its reason."""
        self._send_all([(protocol.FailEpisode(each, _for_good(reason)), ()) for each, reason in reasons.items()])

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int, groups: int = 1) -> list[Lease]:
        """Trajectories that need scores of the kinds in `serves`, bounded by number and tokens; or up to `groups` whole
        groups, for the kind that scores groups. Waits about a second for the first.
        """
        answer = self._send(
            protocol.LeaseTrajectories(self._worker, self._incarnation, list(serves), trajectories, tokens, groups)
        )
        leased = answer.read(protocol.LEASES) if answer.kind == OK else []
        return list(read_leases(leased, answer.frames))

    def renew(self) -> None:
        """Renew the leases of this scorer."""
        self._send(protocol.RenewLease(self._worker))

    def label(self, labels: Sequence[Labels]) -> None:
        """Deliver labels; returns once all are durable. If some were refused, raises the first RefusedError once the
        others are durable.
        """
        request = protocol.PutLabels(self._worker, self._incarnation)
        self._send_all([(request, encode(labels_message(each))) for each in labels])

    def label_group(self, labels: Sequence[Labels]) -> None:
        """Deliver the labels of a group that was leased whole, in the order of the lease; returns once all are durable.
        Raises RefusedError: the replay took none of them."""
        frames = [join(encode(labels_message(each))) for each in labels]
        self._send_all([(protocol.PutGroupLabels(self._worker, self._incarnation), frames)])

    def scoring_failed(self, trajectory_id: str, reason: str) -> None:
        """Give the scoring of a trajectory up for now, with the reason, or of its group if leased whole."""
        self._send(protocol.FailScoring(self._worker, self._incarnation, trajectory_id, _for_good(reason)))

    def configure(self, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
        """Record that the learner uses these values of all keys from `time`, in seconds since 1970; returns every
        change that the run had so far. Raises ConfigError: a run that resumes keeps the values of some keys.
        """
        try:
            return self._send(protocol.Configure(dict(values), time)).read(protocol.CHANGES)
        except RefusedError as error:
            # Starting the learner again would not help.
            raise ConfigError(str(error)) from error

    def require(self, needs: LabelNeeds, first: int) -> None:
        """Have only episodes planned whose labels meet these needs, from step `first` on."""
        self._send(protocol.RequireLabels(first, [*needs.scores], needs.unit_steps))

    def plan(self, step: int) -> BatchPlan | None:
        """The plan of a learner step; waits about a second for it, then None. Raises TooManyFailuresError."""
        return self._ask(protocol.GetPlan(step, ahead=False), protocol.PLAN)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        """The plan of a step after the learner's, if there is one already; does not wait for it."""
        return self._ask(protocol.GetPlan(step, ahead=True), protocol.PLAN)

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Trajectories, in the order of `ids`. Raises RefusedError: one is no longer stored."""
        return [read_trajectory(message) for message in self._fetch("data", ids)]

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """Labels of trajectories, in the order of `ids`. Raises RefusedError: some are no longer stored."""
        return [read_labels(message) for message in self._fetch("labels", ids)]

    def _fetch(self, table: Literal["data", "labels"], ids: Sequence[str]) -> Iterator[Message]:
        batches = [list(ids[start : start + MAX_FETCH]) for start in range(0, len(ids), MAX_FETCH)]
        answers = self._send_all([(protocol.Fetch(table, batch), ()) for batch in batches], FETCH_CREDITS)
        return (_stored(frame) for answer in answers for frame in answer.frames)

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The bytes of the image of this digest that a trajectory shows. Raises RefusedError: it is not there."""
        return bytes(self._send(protocol.FetchImage(trajectory, name)).frames[0])

    def task(self, name: str) -> Task | None:
        """The task of which the trajectory `name` is an episode; None: the replay does not know it."""
        return self._ask(protocol.GetTask(name), protocol.TASK)

    def published(self, version: int) -> None:
        """The learner has published `version`."""
        self._send(protocol.Published(version))

    def checkpointed(self, steps: int, kept: int) -> None:
        """Note that a checkpoint covers the first `steps` steps. Every checkpoint that may still be resumed covers the
        first `kept`, whose trajectories may be forgotten. Raises RefusedError: fewer steps were planned.
        """
        self._send(protocol.Checkpointed(steps, kept))

    def evaluate(self, version: int) -> None:
        """Have the held-out tasks run greedily with `version` or newer; asking twice does nothing more."""
        self._send(protocol.Evaluate(version))

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """The result of an evaluation: outcome, accuracy, reward, count, failed; tokens, those of newer versions
        (newer_tokens) and newest_version; sources, with a Tally for each data source. None while it is not complete;
        `wait` waits about a second for it."""
        return self._ask(protocol.GetEvaluation(version, wait), protocol.RESULT)

    def finished(self) -> None:
        """Tell the replay that the learner has done the last step of the run. A replay without a supervisor then ends
        soon, and workers get RunOverError from `tickets`, `lease` and `renew`."""
        self._send(protocol.Finished())

    def status(self) -> dict[str, Any]:
        """Counters and depths."""
        return self._send(protocol.GetStatus()).read(protocol.VALUES)

    def requeue(self, ticket: str) -> str:
        """Try a dead letter again; says how: scoring or task. Raises RefusedError."""
        return self._send(protocol.Requeue(ticket)).read(protocol.TEXT)

    def discard(self, ticket: str) -> None:
        """Forget a dead letter with its episode. Raises RefusedError."""
        self._send(protocol.Discard(ticket))

    def skip_plan(self, step: int, reason: str) -> int:
        """Have a recorded plan's step train nothing; how many trajectories died with it. Raises RefusedError."""
        return self._send(protocol.SkipPlan(step, _for_good(reason))).read(protocol.NUMBER)

    def audit(self) -> dict[str, Any]:
        """Count the accepted trajectories by state, the lost ones, and those that were planned twice."""
        return self._send(protocol.GetAudit()).read(protocol.VALUES)

    def _ask(self, request: ReplayRequest, decoder: Decoder[T]) -> T | None:
        """The reply's body; None where the replay has nothing yet."""
        answer = self._send(request)
        return answer.read(decoder) if answer.kind == OK else None

    def _send(self, request: ReplayRequest) -> Answer:
        return self._send_all([(request, ())])[0]

    def _send_all(self, requests: Sequence[Request], credits: int = CREDITS) -> list[Answer]:
        """The replies to requests, as the link gives them.

        Raises RefusedError with the replay's first reason, once all are answered; TooManyFailuresError: the replay says
        that the run must end; RunOverError: this is a worker, and the run is done.
        """
        answers = self._link.answers(requests, credits)
        return [_accepted(request.kind, answer) for (request, _), answer in zip(requests, answers, strict=True)]


def read_leases(leased: Iterable[protocol.LeasedTask], frames: Sequence[Buffer]) -> Iterator[Lease]:
    """The leases in a reply. Raises WireError: it is malformed."""
    stored = map(_stored, frames)
    task = None
    for each in leased:
        task = each.task or task
        if task is None:
            raise WireError("the first leased trajectory has no task")
        trajectory = read_trajectory(next(stored))
        yield Lease(task, trajectory, each.kinds, read_labels(next(stored)) if each.partial else None, each.final)


def _for_good(reason: str) -> str:
    """A reason as the replay keeps it."""
    return masked_text(cut(reason, MAX_REASON_CHARS))


def _first_to_show(trajectories: Mapping[int, Trajectory]) -> list[int]:
    """The indices of trajectories with an image that no earlier member of their group has. The members of a group
    mostly have the same images, which the first one sends for all. Tools may add further images to each.
    """
    found: list[int] = []
    brought: dict[str, set[bytes]] = {}
    for at, each in trajectories.items():
        shown = set(each.image_names)
        if each.group_id not in brought or not shown <= brought[each.group_id]:
            found.append(at)
            brought[each.group_id] = shown | brought.get(each.group_id, set())
    return found


def _accepted(kind: str, answer: Answer) -> Answer:
    """The answer to a request of this kind. Raises RefusedError, TooManyFailuresError and RunOverError if the answer is
    one.
    """
    if answer.kind == OVER:
        raise RunOverError("the run is done: this process ends")
    if answer.kind == REFUSED:
        raise RefusedError(f"the replay refused {kind}: {answer.reason}")
    if answer.kind == ENDED:
        raise TooManyFailuresError(answer.reason)
    return answer


def _stored(frame: Buffer) -> Message:
    """The message of a trajectory or of labels as the store keeps it."""
    return decode(split(frame))
