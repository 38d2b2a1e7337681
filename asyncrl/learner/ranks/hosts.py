"""The learner's hosts: they start their ranks together, watch each other, and end their ranks together.

Each host has one launcher. The launcher of host 0 waits until all hosts have joined, and checks that they share the
run's folder and configuration. Every other launcher sends the states of its own ranks to host 0 every second.

If a rank or a whole host dies or hangs, the ranks of all hosts end with the reason, and each launcher fails. When the
launchers are started again, the next round (start of all ranks) begins.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from asyncrl.errors import AsyncrlError, ConfigError, StoppedError, UnavailableError
from asyncrl.learner.ranks.activity import RankState, StuckFinder
from asyncrl.learner.ranks.launcher import Meeting, RanksError, Timeouts, all_ended
from asyncrl.learner.ranks.rendezvous import (
    MAX_MESSAGE_BYTES,
    Alive,
    Caller,
    Ended,
    Join,
    Joined,
    Request,
    StoreCall,
    Stored,
    Verdict,
    mark_of,
)
from asyncrl.machine.ports import listening
from asyncrl.network.interfaces import interface_towards
from asyncrl.network.keys import client_keys, server_keys
from asyncrl.network.listener import Listener
from asyncrl.network.throttle import Throttled

logger = logging.getLogger(__name__)

RETRY_S = 0.5
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings of one of the learner's hosts.

    - `node`: the number of this host.
    - `nodes`: the number of all hosts.
    - `ranks`: the number of ranks on each host.
    - `rendezvous`: the address with the port at which host 0 listens.
    - `interface`: the network interface of the ranks. None: the one that leads to host 0.
    - `keys`: the folder of the run's keys, which all hosts share, or None.
    - `folder`: the run's folder, which all hosts share.
    - `digests` maps each key whose value must be equal on all hosts to a digest of the value.
    """

    node: int
    nodes: int
    ranks: int
    rendezvous: str
    interface: str | None
    keys: str | None
    folder: Path
    digests: Mapping[str, str]

    def meeting(self, round_name: str) -> Meeting:
        """Return the place where this host's ranks connect with all other ranks in a round, and their numbers."""
        host, _, port = self.rendezvous.rpartition(":")
        interface = self.interface or interface_towards(host, int(port))
        first, size = self.node * self.ranks, self.nodes * self.ranks
        return Meeting(first, size, f"tcp://{self.rendezvous}", round_name, interface)


def open_host(settings: HostSettings, timeouts: Timeouts, stop: threading.Event) -> FirstHost | OtherHost:
    """Open this host's end of the connections between all hosts.

    Raises ConfigError: this host's keys or its network interface are missing, or host 0 cannot listen at its address,
    which is taken or belongs to another machine. Raises StoppedError: this process was asked to stop.
    """
    return OtherHost(settings, timeouts) if settings.node else FirstHost(settings, timeouts, stop)


class _Member(msgspec.Struct):
    """The record that host 0 has of another host. `silent_s` counts only while host 0 itself runs."""

    join: Join
    tries: int = 0
    silent_s: float = 0.0
    states: list[RankState] = []
    ended: str | None = None
    told: bool = False


class FirstHost:
    """Host 0, which the other hosts join, for one round."""

    several = True

    def __init__(self, settings: HostSettings, timeouts: Timeouts, stop: threading.Event) -> None:
        self._timeouts = timeouts
        self._finder = StuckFinder(timeouts.stuck, timeouts.poll)
        self._others = range(1, settings.nodes)
        self._folder = settings.folder
        self._round = uuid.uuid4().hex
        self._meeting = settings.meeting(self._round)
        self._digests = dict(settings.digests)
        self._members: dict[int, _Member] = {}
        self._replaced: set[str] = set()
        self._store: dict[str, bytes] = {}
        self._refused = self._over = ""
        self._begun = self._stopping = self._final = False
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._malformed = Throttled(
            logger, "refused a message of another host, which may have another version of asyncrl"
        )
        self._context = zmq.Context()
        self._listener = listening(
            lambda: Listener(self._context, self._meeting.place, server_keys(settings.keys), MAX_MESSAGE_BYTES),
            f"learner.rendezvous={settings.rendezvous}",
            stop,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        mark_of(self._folder, self._round, 0).touch()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def meet(self, stop: threading.Event) -> Meeting:
        """Wait for all hosts. Raises StoppedError: `stop` was set; ConfigError: the hosts cannot train together. The
        message has every reason."""
        shown: list[int] = []
        while True:
            with self._lock:
                absent, problems = self._absent(), self._problems()
                self._begun = not absent and not problems
                self._refused = "\n".join(problems) if not absent else ""
            if self._begun:
                logger.info("all hosts of the learner have joined")
                return self._meeting
            if self._refused:
                self._linger(ANSWER_S)
                raise ConfigError(self._refused)
            if absent != shown:
                logger.info("waiting at %s for host %s", self._meeting.place, ", ".join(map(str, absent)))
                shown = absent
            if stop.wait(RETRY_S):
                raise StoppedError("stopped while it waited for other hosts")

    def _absent(self) -> list[int]:
        """Return the hosts that have not joined, or do not see host 0's file in the run's folder yet."""
        tries = self._timeouts.folder / RETRY_S
        seen = (node for node, each in self._members.items() if each.join.sees_folder or each.tries >= tries)
        return sorted(set(self._others) - set(seen))

    def _problems(self) -> list[str]:
        found = []
        for node, each in sorted(self._members.items()):
            if different := dict(each.join.settings.items() ^ self._digests.items()):
                found.append(
                    f"host {node} and host 0 have different values of {', '.join(sorted(different))}: set equal ones"
                )
            if not each.join.sees_folder:
                found.append(
                    f"host {node} does not share the folder {self._folder.absolute()} with host 0: checkpoints need a "
                    "run.dir that all hosts of the learner read and write"
                )
        return found

    def report(self, states: Sequence[RankState], stopping: bool) -> bool:
        """Take the states of this host's ranks, and return True if all ranks must stop. Call it at every poll. Raises
        RanksError: the ranks of all hosts must end."""
        with self._lock:
            self._stopping |= stopping
            running = {node: each for node, each in self._members.items() if each.ended is None}
            for node, each in running.items():
                each.silent_s += self._timeouts.poll
                if each.silent_s >= self._timeouts.silence:
                    self._fail(f"host {node} has not been heard of for {each.silent_s:.0f} s")
            every = [*states, *(state for each in running.values() for state in each.states)]
            self._fail(self._finder.find(every) or "")
            if self._over:
                raise all_ended(self._over, self._final)
            return self._stopping

    def finish(self, reason: str, final: bool) -> None:
        """Tell the other hosts that the ranks of this host have ended, with a reason if they failed."""
        with self._lock:
            self._fail(reason, final)
        if self._begun:
            self._linger(self._timeouts.others if self._over else self._timeouts.stop)
        self.close()

    def _fail(self, reason: str, final: bool = False) -> None:
        if reason and not self._over:
            self._over, self._final = reason, final

    def _linger(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if all(each.told or each.ended is not None for each in self._members.values()):
                    return
            time.sleep(0.05)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._listener.close()
        self._context.destroy(linger=500)
        for node in (0, *self._others):
            mark_of(self._folder, self._round, node).unlink(missing_ok=True)

    def _serve(self) -> None:
        socket = self._listener.socket
        while not self._closing.is_set():
            if not socket.poll(50):
                continue
            sender, *rest = socket.recv_multipart()
            try:
                number, content = rest
                request = msgspec.msgpack.decode(content, type=Request)
                with self._lock:
                    answer = self._answer(request)
                socket.send_multipart([sender, number, msgspec.msgpack.encode(answer)])
            except (ValueError, OSError, msgspec.MsgspecError, AsyncrlError, zmq.ZMQError) as error:
                self._malformed.say(error)

    def _answer(self, request: Request) -> Joined | Verdict | Stored:
        if isinstance(request, Join):
            return self._join(request)
        if request.round != self._round:
            return Verdict(False, "host 0 was started again meanwhile")
        if isinstance(request, StoreCall):
            return self._stored(request)
        member = self._members.get(request.node)
        if member is None:
            return Verdict(False, f"host {request.node} has not joined")
        member.silent_s = 0.0
        if isinstance(request, Ended):
            member.ended, member.states = request.reason, []
            self._fail(request.reason and f"host {request.node}: {request.reason}", request.final)
        else:
            member.states = request.states
            self._stopping |= request.stopping
        member.told = bool(self._over)
        return Verdict(self._stopping, self._over, self._final)

    def _join(self, join: Join) -> Joined:
        if join.node not in self._others:
            return Joined("", f"learner.nodes={len(self._others) + 1} has no host {join.node}", False, [])
        twice = f"another host has learner.node={join.node} too; give each host a different number"
        if join.process in self._replaced:
            return Joined("", twice, False, [])
        known = self._members.get(join.node)
        if known is not None and known.join.process != join.process:
            if self._begun:
                self._fail(f"host {join.node} was started again, or {twice}")
                return Joined(self._round, "", False, [])
            self._replaced.add(known.join.process)
            known = None
        both = join.sees_folder and mark_of(self._folder, self._round, join.node).exists()
        member = self._members[join.node] = known or _Member(join)
        member.join = msgspec.structs.replace(join, sees_folder=both)
        member.tries += join.round == self._round
        member.told = bool(self._refused)
        return Joined(self._round, self._refused, self._begun, self._absent())

    def _stored(self, call: StoreCall) -> Stored:
        store, key = self._store, call.key
        match call.method:
            case "set":
                store[key] = call.value
            case "add":
                store[key] = str(int(store.get(key, b"0")) + call.amount).encode()
            case "compare_set" if store.get(key, b"") == call.expected:
                store[key] = call.value
            case "compare_set":
                return Stored(store.get(key, call.expected))
            case "delete_key":
                return Stored(store.pop(key, None))
        return Stored(store.get(key))


class OtherHost:
    """A host other than host 0, for one round."""

    several = True

    def __init__(self, settings: HostSettings, timeouts: Timeouts) -> None:
        self._settings, self._timeouts = settings, timeouts
        self._node = settings.node
        self._meeting = settings.meeting("")
        self._folder = settings.folder
        self._context = zmq.Context()
        self._caller = Caller(self._context, self._meeting.place, client_keys(settings.keys))
        self._verdict = Verdict(False, "")
        self._states: Sequence[RankState] = ()
        self._stopping = False
        self._silent_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="rendezvous", daemon=True)

    def meet(self, stop: threading.Event) -> Meeting:
        """Join, and wait for all hosts.

        Raises StoppedError: `stop` was set; ConfigError: the hosts cannot train together, and the message has every
        reason; RanksError: host 0 has not answered for longer than both limits `Timeouts.start` and `Timeouts.stuck`.
        """
        process, joined, absent = uuid.uuid4().hex, Joined("", "", False, []), Throttled(logger, "waiting for hosts")
        heard = time.monotonic()
        while not joined.begun:
            sees = bool(joined.round) and self._leave_mark(joined.round)
            join = Join(self._node, process, dict(self._settings.digests), joined.round, sees)
            try:
                joined = self._caller.call(join, Joined, ANSWER_S)
                heard = time.monotonic()
            except UnavailableError as error:
                absent.say(error)
                if time.monotonic() - heard > max(self._timeouts.start, self._timeouts.stuck):
                    raise RanksError(f"the first host of the learner: {error}") from error
            if joined.refused:
                raise ConfigError(joined.refused)
            if stop.wait(0.0 if joined.begun else RETRY_S):
                raise StoppedError("stopped while it waited for other hosts")
        self._meeting = self._settings.meeting(joined.round)
        self._thread.start()
        return self._meeting

    def _leave_mark(self, round_name: str) -> bool:
        try:
            if not mark_of(self._folder, round_name, 0).exists():
                return False
            mark_of(self._folder, round_name, self._node).touch()
        except OSError as error:
            logger.warning("the run's folder cannot be used: %s", error)
            return False
        return True

    def _exchange(self) -> None:
        while not self._closing.is_set():
            request = Alive(self._meeting.round, self._node, list(self._states), self._stopping)
            try:
                self._verdict = self._caller.call(request, Verdict, ANSWER_S)
                self._silent_s = 0.0
            except (UnavailableError, ConfigError) as error:
                logger.warning("the first host of the learner: %s", error)
            self._closing.wait(self._timeouts.heartbeat)

    def report(self, states: Sequence[RankState], stopping: bool) -> bool:
        """Do the same as `FirstHost.report`."""
        self._states, self._stopping = states, stopping or self._stopping
        self._silent_s += self._timeouts.poll
        if self._silent_s >= self._timeouts.silence:
            raise all_ended(f"host 0 has not answered for {self._silent_s:.0f} s")
        if self._verdict.over:
            raise all_ended(self._verdict.over, self._verdict.final)
        return self._verdict.stop

    def finish(self, reason: str, final: bool) -> None:
        """Do the same as `FirstHost.finish`."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
            try:
                self._caller.call(Ended(self._meeting.round, self._node, reason, final), Verdict, ANSWER_S)
            except (UnavailableError, ConfigError) as error:
                logger.warning("host 0 does not know that the ranks of this host have ended: %s", error)
        self._caller.close()
        self._context.destroy(linger=0)
