"""The client of the replay, for actors, scorers, learner ranks and commands.

A call waits until the replay has answered, even if the replay restarts meanwhile. The client may repeat a request, but
each request takes effect only once. Each thread needs its own client.
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
    TasksSolvedError,
    TooManyFailuresError,
    WireError,
)
from asyncrl.masking import masked_text
from asyncrl.network.keys import ClientKeys
from asyncrl.observe.spans import Spans
from asyncrl.replay import messages, protocol
from asyncrl.replay.client.link import CREDITS, RETRY_S, ReplayLink, Request
from asyncrl.replay.messages import ENDED, OK, OVER, REFUSED, SOLVED, Answer
from asyncrl.replay.protocol import MAX_FETCH, ReplayRequest
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
"""The outcome of a delivery: "stored", "duplicate" or "late", or the error with which it was refused."""

INCOMPLETE = "incomplete"
FETCH_CREDITS = 4
"""The maximum number of requests with large replies that may be unanswered at the same time."""
RENEWALS_PER_LEASE = 4
"""The number of times that a worker renews its lease within `replay.lease_s`."""


class ReplayClient:
    """One connection of `worker` to the replay at `endpoint`.

    - `incarnation`: identifies one process of the worker. When the worker is restarted, the work of its older
      incarnation goes to other workers.
    - `stop`: ends waits with StoppedError.
    - `give_up_s`: if set, a wait ends with UnavailableError after this many seconds.
    - `keys`: the keys that encrypt the connection, from the folder network.keys.
    - `run`: sent with every request. The replay of another run refuses the request. Without `run`, the replay answers
      only requests that change nothing.
    - `retry_s`: a request without an answer for this time is sent again.
    - `spans`: the recorder of this process's timeline. It gets the offset of the replay's clock.
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
        """Up to `want` tickets. Waits about a second for the first. `holding` are the tickets that this client has.
        `waiting` are those tickets in `holding` whose episodes wait for a version or for delivery."""
        request = protocol.GetTickets(self._worker, self._incarnation, list(holding), list(waiting), want)
        return self._ask(request, messages.TICKETS) or []

    def leave(self) -> None:
        """Tell the replay that this incarnation ends. Its work goes to other workers at once."""
        self._send(protocol.Leave(self._worker, self._incarnation))

    def put(self, trajectory: Trajectory, images: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
        """Deliver a trajectory. Returns "stored" once it is durable, "duplicate" if it was stored before, or "late" if
        its ticket has ended (the trajectory is counted, but not kept). `images` has all images of the trajectory by
        digest. If the replay lacks one of them, all are sent. Raises RefusedError: the replay refused the trajectory.
        WireError: the trajectory cannot be encoded."""
        [outcome] = self.put_all([trajectory], images)
        if isinstance(outcome, str):
            return outcome
        raise outcome

    def put_all(
        self, trajectories: Sequence[Trajectory], images: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> list[Outcome]:
        """Deliver several trajectories together. Returns when all are durable or refused. Each result is the one that
        `put` would return, or the error that `put` would raise."""
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
        """Send each trajectory, with its images if `images` is given. Returns the outcome of each."""
        requests: list[Request | WireError] = []
        for trajectory in trajectories.values():
            shown = [] if images is None else [images[name] for name in dict.fromkeys(trajectory.image_names)]
            requests.append(_encoded(protocol.PutTrajectory(len(shown)), trajectory_message(trajectory), shown))
        answers = self._deliver(requests)
        return {
            at: answer.read(messages.TEXT) if isinstance(answer, Answer) else answer
            for at, answer in zip(trajectories, answers, strict=True)
        }

    def _deliver(self, requests: Sequence[Request | WireError]) -> list[Answer | RefusedError | WireError]:
        """Send the requests that could be encoded. Returns for each request its answer or its error."""
        encoded = [each for each in requests if not isinstance(each, WireError)]
        answers = iter(self._link.answers(encoded))
        return [
            each if isinstance(each, WireError) else _answer_or_error(each[0].kind, next(answers)) for each in requests
        ]

    def fail(self, ticket_id: str, reason: str) -> None:
        """Report that an episode failed, with the reason."""
        self.fail_all({ticket_id: reason})

    def fail_all(self, reasons: Mapping[str, str]) -> None:
        """Report that several episodes failed, each with its reason."""
        self._send_all([(protocol.FailEpisode(each, _for_good(reason)), ()) for each, reason in reasons.items()])

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int, groups: int = 1) -> list[Lease]:
        """Lease trajectories that need scores of the kinds in `serves`: at most `trajectories`, with at most `tokens`
        together. If a group waits for scores of the whole group, lease up to `groups` groups instead. Waits about a
        second for the first."""
        answer = self._send(
            protocol.LeaseTrajectories(self._worker, self._incarnation, list(serves), trajectories, tokens, groups)
        )
        leased = answer.read(messages.LEASES) if answer.kind == OK else []
        return list(read_leases(leased, answer.frames))

    def renew(self) -> None:
        """Renew the leases of this scorer."""
        self._send(protocol.RenewLease(self._worker))

    def label(self, labels: Sequence[Labels]) -> list[RefusedError | WireError | None]:
        """Deliver labels. Returns once all are durable or refused. Each result is `None` if the labels were taken.
        Otherwise it is the error: the replay refused the labels, or they cannot be encoded."""
        request = protocol.PutLabels(self._worker, self._incarnation)
        answers = self._deliver([_encoded(request, labels_message(each)) for each in labels])
        return [None if isinstance(answer, Answer) else answer for answer in answers]

    def label_group(self, labels: Sequence[Labels]) -> None:
        """Deliver the labels of a group that was leased whole, in the order of the lease. Returns once all are durable.
        Raises RefusedError: the replay stored none of them."""
        frames = [join(encode(labels_message(each))) for each in labels]
        self._send_all([(protocol.PutGroupLabels(self._worker, self._incarnation), frames)])

    def scoring_failed(self, trajectory_id: str, reason: str) -> None:
        """Report that the scoring of a trajectory failed, or the scoring of its group if the group was leased whole."""
        self._send(protocol.FailScoring(self._worker, self._incarnation, trajectory_id, _for_good(reason)))

    def configure(self, values: Mapping[str, Any], time: int, planned: int) -> list[ConfigChange]:
        """Record that the learner uses these values of all configuration keys from now on. `time` is the present time
        in seconds since 1970, and `planned` the number of steps that every shard has planned. Returns all changes of
        the run so far. Raises ConfigError: the replay refused the values, for example because a value has changed that
        a resumed run must keep."""
        try:
            return self._send(protocol.Configure(dict(values), time, planned)).read(messages.CHANGES)
        except RefusedError as error:
            # A ConfigError stops the run, since a restart of the learner would not help.
            raise ConfigError(str(error)) from error

    def require(self, needs: LabelNeeds, first: int) -> None:
        """Have the replay plan only episodes whose labels meet these needs, from step `first` on."""
        self._send(protocol.RequireLabels(first, [*needs.scores], needs.unit_steps))

    def plan(self, step: int) -> BatchPlan | None:
        """The plan of a learner step. `None` if there is none within about a second. Raises TooManyFailuresError or
        TasksSolvedError: the replay ends the run."""
        return self._ask(protocol.GetPlan(step, ahead=False), messages.PLAN)

    def plan_at_once(self, step: int) -> BatchPlan | None:
        """The plan of a learner step. If there is none yet, the replay records one without trajectories."""
        return self._ask(protocol.PlanAtOnce(step), messages.PLAN)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        """The plan of a step that the learner has not reached. `None` if there is none yet; does not wait."""
        return self._ask(protocol.GetPlan(step, ahead=True), messages.PLAN)

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of `ids`, in their order. Raises RefusedError: one is no longer stored."""
        return [read_trajectory(message) for message in self._fetch("data", ids)]

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """The labels of the trajectories `ids`, in their order. Raises RefusedError: some are no longer stored."""
        return [read_labels(message) for message in self._fetch("labels", ids)]

    def _fetch(self, table: Literal["data", "labels"], ids: Sequence[str]) -> Iterator[Message]:
        batches = [list(ids[start : start + MAX_FETCH]) for start in range(0, len(ids), MAX_FETCH)]
        answers = self._send_all([(protocol.Fetch(table, batch), ()) for batch in batches], FETCH_CREDITS)
        return (_stored(frame) for answer in answers for frame in answer.frames)

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The bytes of an image of a trajectory. `name` is the image's digest. Raises RefusedError: the image is not
        stored."""
        return bytes(self._send(protocol.FetchImage(trajectory, name)).frames[0])

    def task(self, name: str) -> Task | None:
        """The task of the trajectory `name`. `None` if the replay does not know it."""
        return self._ask(protocol.GetTask(name), messages.TASK)

    def published(self, version: int) -> None:
        """Tell the replay that the learner has published `version`."""
        self._send(protocol.Published(version))

    def checkpointed(self, steps: int, kept: int) -> None:
        """Tell the replay that a checkpoint covers the first `steps` steps, and that every kept checkpoint covers the
        first `kept` steps, whose trajectories may be deleted. Raises RefusedError: fewer steps were planned."""
        self._send(protocol.Checkpointed(steps, kept))

    def evaluate(self, version: int) -> None:
        """Have the held-out tasks run with policy version `version` or a newer one. A repeated call has no effect."""
        self._send(protocol.Evaluate(version))

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """The result of an evaluation, as a mapping with these keys: outcome, accuracy, reward, count, failed, tokens,
        newest_version, newer_tokens (tokens that newer versions sampled), sample (the ids of the kept episodes), and
        sources (a Tally for each data source).

        `None` while the evaluation is incomplete. With `wait`, waits about a second for it."""
        return self._ask(protocol.GetEvaluation(version, wait), messages.RESULT)

    def finished(self) -> None:
        """Tell the replay that the learner has done the last step of the run. A replay that no supervisor started then
        ends soon, and workers get RunOverError from `tickets`, `lease` and `renew`."""
        self._send(protocol.Finished())

    def status(self) -> dict[str, Any]:
        """The replay's counters, and the sizes of its tables."""
        return self._send(protocol.GetStatus()).read(messages.VALUES)

    def requeue(self, ticket: str) -> str:
        """Try a dead letter (a failed attempt) again. Returns "scoring" if its episode is scored again, or "task" if
        its task runs again. Raises RefusedError: there is no such dead letter, or it cannot be tried again."""
        return self._send(protocol.Requeue(ticket)).read(messages.TEXT)

    def discard(self, ticket: str) -> None:
        """Delete a dead letter with its episode. Raises RefusedError: there is no such dead letter."""
        self._send(protocol.Discard(ticket))

    def skip_plan(self, step: int, reason: str) -> int:
        """Have the step of a recorded plan train nothing. Returns the number of trajectories that became dead letters.
        Raises RefusedError: the step has no plan, or was trained."""
        return self._send(protocol.SkipPlan(step, _for_good(reason))).read(messages.NUMBER)

    def audit(self) -> dict[str, Any]:
        """The audit of all trajectories that were accepted for training (see `counters.audit`)."""
        return self._send(protocol.GetAudit()).read(messages.VALUES)

    def _ask(self, request: ReplayRequest, decoder: Decoder[T]) -> T | None:
        """The reply's body. `None` if the replay has nothing to give yet."""
        answer = self._send(request)
        return answer.read(decoder) if answer.kind == OK else None

    def _send(self, request: ReplayRequest) -> Answer:
        return self._send_all([(request, ())])[0]

    def _send_all(self, requests: Sequence[Request], credits: int = CREDITS) -> list[Answer]:
        """The replies to all requests, in order.

        After all replies have arrived, raises the first error among them. RefusedError: the replay refused a request.
        TooManyFailuresError, TasksSolvedError: the run must end. RunOverError: a worker requested work, and the run is
        done."""
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
    """A reason without secrets, cut to the replay's limit."""
    return cut(masked_text(reason), MAX_REASON_CHARS)


def _first_to_show(trajectories: Mapping[int, Trajectory]) -> list[int]:
    """The indices of trajectories with an image that no earlier member of their group has. Usually all members of a
    group have the same images, and the first member sends them for all. But tools may add images to single members."""
    found: list[int] = []
    brought: dict[str, set[bytes]] = {}
    for at, each in trajectories.items():
        shown = set(each.image_names)
        if each.group_id not in brought or not shown <= brought[each.group_id]:
            found.append(at)
            brought[each.group_id] = shown | brought.get(each.group_id, set())
    return found


def _encoded(request: ReplayRequest, message: Message, further: Sequence[Buffer] = ()) -> Request | WireError:
    """The request with the frames of the message and the `further` frames. If the message cannot be encoded, the
    error."""
    try:
        return request, [*encode(message), *further]
    except WireError as error:
        return error


def _answer_or_error(kind: str, answer: Answer) -> Answer | RefusedError:
    try:
        return _accepted(kind, answer)
    except RefusedError as error:
        return error


def _accepted(kind: str, answer: Answer) -> Answer:
    """The answer, unless it reports an error. Raises RefusedError, TooManyFailuresError, TasksSolvedError or
    RunOverError for such an answer."""
    if answer.kind == OVER:
        raise RunOverError("the run is done: this process ends")
    if answer.kind == REFUSED:
        raise RefusedError(f"the replay refused {kind}: {answer.reason}")
    if answer.kind == ENDED:
        raise TooManyFailuresError(answer.reason)
    if answer.kind == SOLVED:
        raise TasksSolvedError(answer.reason)
    return answer


def _stored(frame: Buffer) -> Message:
    """The message of a stored trajectory or of stored labels."""
    return decode(split(frame))
