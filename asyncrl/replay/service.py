"""The replay without its sockets: handles each request within one transaction.

Clients may repeat any request after a lost reply. The reply `None` means "nothing yet": the server tries again when the
state has changed, for a limited time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from asyncrl.errors import RefusedError, RunOverError, StoreError, WireError
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay import counters, protocol
from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.learner_waits import LearnerWaits
from asyncrl.replay.batches.old_groups import OldGroups
from asyncrl.replay.batches.planning import Planning
from asyncrl.replay.failures.backoff import EPISODES, SCORINGS, FailureBackoff
from asyncrl.replay.failures.dead_letters import DeadLetters
from asyncrl.replay.failures.failure_limit import FailureLimit, check_all
from asyncrl.replay.failures.filter_limit import ABOVE_1, FilterLimit
from asyncrl.replay.groups import OpenGroups
from asyncrl.replay.held_out import evaluation
from asyncrl.replay.labels.labelling import Labelling
from asyncrl.replay.labels.leases import WorkerLeases
from asyncrl.replay.messages import Call, Reply
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.stages import Stages
from asyncrl.replay.starts.ending import RunEnd
from asyncrl.replay.starts.pacing import Pace
from asyncrl.replay.store.changes import configure
from asyncrl.replay.store.images import image_of
from asyncrl.replay.store.pinned import require_pinned
from asyncrl.replay.store.readers import Readers
from asyncrl.replay.store.records import TrajectoryRecord
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.tickets import TicketQueue
from asyncrl.types import RunIdentity
from asyncrl.wire import check_run, decode, read_labels, read_trajectory

WORK = (protocol.GetTickets, protocol.LeaseTrajectories, protocol.RenewLease)
"""The requests in which workers ask for work or keep it. If the run is done, the reply says so."""
TRAINING = (protocol.GetPlan, protocol.PlanAtOnce, protocol.Published, protocol.Evaluate)
"""The requests of a learner that trains. If one of them comes after the run was done, the run continues."""
PUT_OFF_S = 3.0
"""After a request was put off, its client repeats it within this time. So if no request was put off during this time,
the cause is over."""


class ReplayService:
    """The whole replay except its sockets.

    - `clock`: gives monotonic seconds.
    - `failed_handshakes`: returns the number of the socket's failed handshakes.
    - `run`: if set, the store and all requests must belong to this run. A request without a run may only read.
    - `ends`: if true, the learner's report that the run is done makes the replay tell its workers, and then end.
    - `spans`: records the stages of episodes and groups.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        lease_s: float,
        clock: Callable[[], float],
        failed_handshakes: Callable[[], int] = lambda: 0,
        run: RunIdentity | None = None,
        ends: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._put_off, self._put_off_at = "", -math.inf
        self._failed_handshakes = failed_handshakes
        self._run = run
        self._backoff = FailureBackoff(clock)
        self._limits = {kind: FailureLimit(kind, clock, settings.max_failure_share) for kind in (EPISODES, SCORINGS)}
        self._filter_limit = FilterLimit(settings.batch_size // settings.group_size, settings.max_refused_groups)
        self._actors = WorkerLeases("actors", lease_s, clock)
        self._scorers = WorkerLeases("scorers", lease_s, clock)
        self._dead_letters = DeadLetters(settings)
        spans = spans or NoSpans()
        stages = Stages(spans)
        self._pace = Pace(settings)
        self._groups = OpenGroups(settings, self._backoff, self._limits, self._dead_letters, stages, self._pace)
        self._labelling = Labelling(
            settings,
            self._groups,
            self._scorers,
            self._backoff,
            self._limits[SCORINGS],
            self._filter_limit,
            self._dead_letters,
            stages,
        )
        self._tickets = TicketQueue(
            settings, self._groups, self._labelling, self._actors, self._backoff, self._limits[EPISODES], clock, stages
        )
        self._old_groups = OldGroups(settings, clock)
        self._planning = Planning(settings, self._groups, self._dead_letters, stages, self._pace, self._old_groups)
        self._waits = LearnerWaits(clock, spans)
        self._end = RunEnd(clock)
        self._ends = ends
        self.readers = Readers(clock)

    def start(self, tx: Transaction) -> None:
        """Continue from the store. Every worker with work gets a fresh lease. If the service has started from this
        store before, the call writes nothing: after a failed commit it runs in a read-only transaction.

        Raises StoreError: the store was imported and has no run to continue, or it belongs to another run."""
        if tx.counter("imported"):
            raise StoreError(
                "this store was imported and cannot be served; read it, or train from it with replay.source="
            )
        self._pin(tx)
        self._tickets.resume(tx)
        self._scorers.resume(tx)
        self._limits[EPISODES].resume(tx.counter("accepted") + tx.counter("accepted_evaluations"))
        self._limits[SCORINGS].resume(tx.counter("labelled"))
        self._filter_limit.resume(tx.count("plans") > 0, bool(tx.get("meta", ABOVE_1, bool)))

    def clean(self, tx: Transaction) -> None:
        """Remove what the settings of this process do not keep. After a resume, the settings may differ from the
        earlier ones."""
        self._planning.evict_old(tx)
        self._groups.forget_untrained(tx)

    def _pin(self, tx: Transaction) -> None:
        """Record the run and the settings on which the store's records depend, or compare them with the recorded
        ones."""
        if self._run is not None:
            owner = tx.run
            if owner is None:
                tx.put("meta", "run", [self._run.name, self._run.id])
            elif owner != self._run:
                raise StoreError(
                    f"this store belongs to run {owner}, not to {self._run}: serve it with that run's name and folder, "
                    "whose file `identity` holds the id"
                )
        before, now = tx.get("meta", "pinned", dict[str, int]), self._settings.pinned()
        require_pinned(tx, now)
        if before != now:
            tx.put("meta", "pinned", now)

    def tick(self, tx: Transaction) -> None:
        """Do the regular work: end old leases, add up the learner's waiting time, and check the readers of the
        store."""
        self.readers.look(tx)
        self._tickets.expire(tx)
        self._labelling.expire(tx)
        self._waits.look(lambda: self._planning.missing(tx))

    def report(self, tx: Transaction) -> dict[str, float]:
        """All numbers of the replay: counters, sizes of tables, bytes, workers, and the learner's waiting times by
        cause."""
        waits = {f"learner_waited_for_{cause}_s": seconds for cause, seconds in self._waits.seconds.items()}
        workers = {
            "actors": self._actors.count,
            "scorers": self._scorers.count,
            "failed_handshakes": self._failed_handshakes(),
        }
        readers = {"dead_readers": self.readers.dead, "lingering_readers": len(self.readers.lingering())}
        bound = self._settings.admission.capacity(tx.counter("version"))
        pace = {"age_bound": bound, "capacity": self._pace.capacity(tx), "ahead": self._pace.ahead(tx)}
        selected = dict(cohorts.selection(tx).values())
        return {**counters.status(tx, self._settings), **pace, **workers, **readers, **waits, **selected}

    def failing(self) -> dict[str, str]:
        """Texts about what keeps the run from progressing. A text is empty if there is nothing to tell.

        - `failing`: the failures because of which fewer tickets are issued
        - `newest_failure`: the newest failure of an episode or a scoring
        - `solved`: filters refuse every group because the policy has learned to solve the tasks
        - `refusing`: filters refuse every group for another reason
        """
        return {
            "failing": self._backoff.text(),
            "newest_failure": self._backoff.newest,
            "refusing": "" if self._filter_limit.is_solved else self._filter_limit.text(),
            "solved": self._filter_limit.text() if self._filter_limit.is_solved else "",
        }

    def put_off(self, reason: str) -> None:
        """Note that a client is told to send a request again later, for this reason."""
        self._put_off, self._put_off_at = reason, self._clock()

    def _old_text(self) -> str:
        """The old groups for which the learner waits, as the end of a sentence about the learner. Empty if it waits for
        none."""
        wait = self._planning.old_wait
        return "" if wait is None or self._waits.now_s() is None else self._old_groups.described(wait)

    def _busy(self) -> str:
        """The reason why requests are put off now. Empty if they are not."""
        return self._put_off if self._clock() - self._put_off_at <= PUT_OFF_S else ""

    def is_over(self) -> bool:
        """True if the run is done and no process still needs the replay."""
        return self._end.is_over(lambda: self._actors.silence().keys() | self._scorers.silence().keys())

    def handle(self, tx: Transaction, call: Call) -> Reply | None:
        """The reply to a request. `None` if it cannot be answered yet.

        Raises RunOverError: a worker requests work, and the run is done. Any other AsyncrlError refuses the request,
        and the caller must undo it."""
        request = call.request
        if isinstance(request, WireError):
            raise request
        if self._run is not None and not (request.question and call.run is None):
            check_run(call.run, request.kind, self._run, "replay", "network.replay_port")
        if isinstance(request, WORK) and self._end.tell(request.worker):
            raise RunOverError("the run is done")
        match request:
            case protocol.GetTickets():
                return self._tickets.give(tx, request)
            case protocol.Leave():
                self._tickets.leave(tx, request)
                self._labelling.leave(tx, request)
            case protocol.PutTrajectory():
                first = max(0, len(call.frames) - request.images)
                frames, images = call.frames[:first], call.frames[first:]
                return Reply(self._tickets.put(tx, read_trajectory(decode(frames)), frames, images))
            case protocol.LeaseTrajectories():
                return self._labelling.lease(tx, request)
            case protocol.PutLabels():
                self._labelling.label(tx, request, read_labels(decode(call.frames)), call.frames)
            case protocol.PutGroupLabels():
                self._labelling.label_group(tx, request, call.frames)
            case protocol.Fetch():
                return self._fetch(tx, request)
            case protocol.FetchImage():
                record = TrajectoryRecord.load(tx, request.id)
                if record is None:
                    raise RefusedError(f"the trajectory {request.id} is unknown")
                return Reply(frames=[image_of(tx, request.id, record.group, request.digest)])
            case protocol.FailEpisode():
                self._tickets.fail(tx, request.ticket, request.reason)
            case protocol.FailScoring():
                self._labelling.fail(tx, request)
            case protocol.RenewLease():
                self._scorers.touch(request.worker)
            case _:
                return self._handle_rare(tx, request)
        return Reply()

    def _handle_rare(self, tx: Transaction, request: protocol.ReplayRequest) -> Reply | None:
        """The reply to a request of a learner rank or a command."""
        if isinstance(request, TRAINING):
            self._end.revoke()
        match request:
            case protocol.Configure():
                return Reply(configure(tx, request.values, request.time, request.planned))
            case protocol.RequireLabels():
                self._planning.require(tx, request.needs, request.first)
            case protocol.GetPlan() if request.ahead:
                return Reply(self._planning.plan_ahead(tx, request.step))
            case protocol.GetPlan():
                check_all(self._limits, self._settings.run)
                plan = self._planning.plan(tx, request.step)
                # A step that waits for old groups has enough complete groups.
                is_short = plan is None and self._planning.old_wait is None
                if is_short:
                    self._filter_limit.check()
                self._waits.asked(plan is not None, lambda: self._planning.missing(tx))
                if is_short:
                    self._pace.waits(tx, request.step, self._waits.now_s() or 0.0)
                return None if plan is None else Reply(plan)
            case protocol.PlanAtOnce():
                self._waits.asked(True, lambda: "")
                return Reply(self._planning.plan_at_once(tx, request.step))
            case protocol.GetTask():
                record = TrajectoryRecord.load(tx, request.id)
                return Reply(None if record is None else self._settings.task_of(request.id, record))
            case protocol.Published():
                self._planning.published(tx, request.version)
            case protocol.Checkpointed():
                self._planning.checkpointed(tx, request.steps, request.kept)
            case protocol.Evaluate():
                if not len(self._settings.held_out):
                    raise RefusedError("there are no tasks to evaluate on: set data.eval to a file of held-out tasks")
                evaluation.start(tx, self._settings, request.version, self._groups.open)
            case protocol.GetEvaluation():
                check_all(self._limits, self._settings.run)
                result = evaluation.result(tx, request.version, self._settings.eval_attempts)
                return None if result is None and request.wait else Reply(result)
            case protocol.Finished():
                if self._ends:
                    self._end.begin()
            case protocol.GetStatus():
                return self._status(tx)
            case protocol.GetAudit():
                return Reply(counters.audit(tx, self._settings.admission.uses))
            case protocol.Requeue():
                return Reply(self._labelling.requeue(tx, request.ticket))
            case protocol.Discard():
                self._dead_letters.discard(tx, request.ticket)
            case protocol.SkipPlan():
                return Reply(self._planning.skip(tx, request.step, request.reason))
        return Reply()

    def _fetch(self, tx: Transaction, request: protocol.Fetch) -> Reply:
        """The stored frames of trajectories or labels. Raises RefusedError: one is missing or damaged."""
        frames = []
        for name in request.ids:
            try:
                value = tx.get_bytes(request.table, name)
            except StoreError as error:
                raise RefusedError(str(error)) from error
            if value is None:
                record = TrajectoryRecord.load(tx, name)
                state = record.state if record else "it is unknown"
                raise RefusedError(f"the {request.table} of {name} are not stored: {state}")
            frames.append(value)
        return Reply(frames=frames)

    def _status(self, tx: Transaction) -> Reply:
        return Reply(
            {
                **self.report(tx),
                "identity": tx.identity,
                "silence_s": {"actors": self._actors.silence(), "scorers": self._scorers.silence()},
                "learner_waits_s": self._waits.now_s(),
                "old_groups": self._old_text(),
                "busy": self._busy(),
                "readers": [asdict(each) for each in self.readers.lingering()],
                **self.failing(),
            }
        )
