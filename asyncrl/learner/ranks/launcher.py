"""The learner's ranks as processes of this machine: started together, watched, and ended together.

The process that starts the ranks is not one of them. The ranks of one machine meet in a file of a folder that only this
user can enter, so no port is open for their rendezvous. `hosts.py` has the rendezvous of several machines.

Each rank writes heartbeats with the state of its main thread into a pipe of its own. A rank without heartbeats is
suspended or hangs, and a rank with heartbeats may still be stuck (see `activity.py`). A rank whose pipe has no reader
ends itself. Linux also kills the ranks when the process that started them ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from asyncrl.config.exits import EXIT_HOPELESS, EXIT_STOPPED, EXIT_USAGE
from asyncrl.errors import AsyncrlError, ConfigError, StoppedError, TooManyFailuresError
from asyncrl.learner.ranks.activity import RankState, Stillness, StuckFinder, state_of
from asyncrl.machine.activity import Activity
from asyncrl.machine.child import ending_with_parent
from asyncrl.machine.numa import cpus_near_gpus, format_cpus
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.machine.temporary_folder import temporary_folder

logger = logging.getLogger(__name__)

VARIABLE = "ASYNCRL_RANK"
"""The environment variable in which a rank gets its membership, as JSON."""
ENDED = "; all ranks were ended"
CAUSES = (-signal.SIGKILL, EXIT_USAGE, EXIT_HOPELESS)
"""Exit statuses that the failure of another rank cannot cause."""
PIPE_BYTES = 1 << 16
"""The bytes that a pipe holds."""
SILENT_BEATS = 5
"""The number of missed heartbeats after which a rank is shown as silent."""
BEGUN_S = 10.0
"""Seconds that a rank's main thread waits until its heartbeat thread has written once. If it never writes, the launcher
ends the ranks after `Timeouts.start`."""
KILLED_S = 10.0
"""Seconds to wait for a process that was killed: a process that hangs in the kernel may never end."""


class RanksError(AsyncrlError):
    """A rank died, hung or did not stop, and all ranks were ended. The message names the rank and the reason."""


def all_ended(reason: str, final: bool = False) -> AsyncrlError:
    """Return the error of a launcher that ended all its ranks for `reason`, which may come from another launcher."""
    message = f"{reason.removesuffix(ENDED)}{ENDED}"
    return ConfigError(message) if final else RanksError(message)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. Each poll counts as `poll` seconds, so that no rank is blamed for a time in which this process
    did not run."""

    poll: float = 0.25
    heartbeat: float = 1.0
    """The time between two heartbeats of a rank."""
    start: float = 300.0
    """The first heartbeat of a rank must come within this time. A rank first loads libraries, which can take a minute
    from a network disk."""
    silence: float = 40.0
    """The time without a heartbeat after which a rank counts as hung."""
    stuck: float = 1800.0
    """The time without progress of a rank's main thread, after which the rank counts as hung."""
    others: float = 5.0
    """After one rank has failed, the launcher waits this long for other ranks to end by themselves: another rank may
    have the true reason."""
    stop: float = 30.0
    """After a stop request, the launcher waits this long for all ranks to end. The time to finish a checkpoint does not
    count."""
    folder: float = 10.0
    """Another host must see host 0's file in the run's folder within this time: a network disk may show the file
    late."""

    @staticmethod
    def within(limit_s: float) -> Timeouts:
        """Return the limits that find a hanging rank after about `limit_s`, if the rank has started."""
        return Timeouts(silence=min(Timeouts().silence, limit_s), stuck=limit_s)


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place where `size` ranks connect with each other, and the numbers of the ranks.

    - `first`: the number of this host's first rank.
    - `place`: the file in which the ranks of one machine meet. For several hosts, the address of the first host.
    - `round`: for several hosts, the name of this start of all ranks. Else empty.
    - `interface`: for several hosts, the network interface between them. Else empty.
    """

    first: int
    size: int
    place: str
    round: str = ""
    interface: str = ""


class Hosts(Protocol):
    """The hosts on which the ranks run. `several` is true if there is more than one."""

    several: bool

    def meet(self, stop: threading.Event) -> Meeting:
        """Wait until the ranks can start, and return the meeting at which they connect."""

    def report(self, states: Sequence[RankState], stopping: bool) -> bool:
        """Take the states of this host's ranks, and return True if all ranks must stop. Call this at every poll. Raises
        RanksError: all ranks must end at once."""

    def finish(self, reason: str, final: bool) -> None:
        """Record that the ranks of this host have ended, with a reason if they failed. `final`: another start would
        fail, too."""


class OneHost:
    """This machine alone, with `size` ranks."""

    several = False

    def __init__(self, size: int, timeouts: Timeouts) -> None:
        self._size = size
        self._finder = StuckFinder(timeouts.stuck, timeouts.poll)
        self._closing = ExitStack()
        self._folder = self._closing.enter_context(temporary_folder("asyncrl-ranks-"))

    def meet(self, stop: threading.Event) -> Meeting:
        return Meeting(0, self._size, str(self._folder / "rendezvous"))

    def report(self, states: Sequence[RankState], stopping: bool) -> bool:
        if stuck := self._finder.find(states):
            raise all_ended(stuck)
        return False

    def finish(self, reason: str, final: bool) -> None:
        self._closing.close()


@dataclass(frozen=True, slots=True)
class Membership:
    """The membership of a rank: its number over all hosts, its `local` number on this host, and its meeting. The rank
    writes a heartbeat into `pipe` every `interval_s`. If `pipe` is None, no process watches the rank."""

    rank: int
    local: int
    meeting: Meeting
    pipe: int | None = None
    interval_s: float = DEFAULT_TIMEOUTS.heartbeat

    @staticmethod
    def of_this_process() -> Membership | None:
        """Return the membership that `run_ranks` gave this process, or None if `run_ranks` did not start it."""
        given = os.environ.get(VARIABLE)
        return msgspec.json.decode(given, type=Membership) if given else None

    def start_heartbeat(self, activity: Activity) -> None:
        """Write heartbeats from now on, if there is a pipe. Kills this process once the pipe has no reader."""
        if self.pipe is not None:
            # Returns after the first heartbeat: from then on the launcher finds a hang by missing heartbeats.
            begun = threading.Event()
            arguments = [self.pipe, activity, begun]
            threading.Thread(target=self._write_heartbeats, args=arguments, name="heartbeat", daemon=True).start()
            begun.wait(BEGUN_S)

    def _write_heartbeats(self, pipe: int, activity: Activity, begun: threading.Event) -> None:
        try:
            while True:
                os.write(pipe, msgspec.json.encode(state_of(activity, self.rank)) + b"\n")
                begun.set()
                time.sleep(self.interval_s)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    """A rank. Its process starts when this object is made."""

    def __init__(self, command: Sequence[str], local: int, meeting: Meeting, timeouts: Timeouts) -> None:
        rank = meeting.first + local
        self.name = f"rank {rank} of {meeting.size}"
        self._timeouts = timeouts
        self._heartbeats, write = os.pipe()
        os.set_blocking(self._heartbeats, False)
        membership = Membership(rank, local, meeting, write, timeouts.heartbeat)
        variables = {VARIABLE: msgspec.json.encode(membership).decode(), WORKER_VARIABLE: f"learner-{rank}"}
        near = cpus_near_gpus(os.environ, only=local)
        try:
            self._process = subprocess.Popen(
                ending_with_parent(command, signal.SIGKILL, near),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                pass_fds=[write],
            )
        except OSError:
            os.close(self._heartbeats)
            raise
        finally:
            os.close(write)
        self._silent = 0.0
        self._stillness = Stillness(timeouts.poll)
        bound = f", bound to the CPUs {format_cpus(near)} near to its GPU" if near else ""
        logger.info("%s is process %d%s", self.name, self._process.pid, bound)

    @property
    def status(self) -> int | None:
        """The exit status, or minus the number of the signal that killed the process; None while it runs."""
        return self._process.poll()

    @property
    def state(self) -> RankState | None:
        """The state at the last heartbeat; None before the first one and after the end of the process."""
        return None if self.status is not None else self._stillness.state

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat. It is 0 before the first heartbeat, and after the end of the process."""
        return 0.0 if self.state is None else self._silent

    def check_heartbeat(self) -> None:
        """Read the pipe. Call this at every poll. Raises RanksError: the rank has run without heartbeats for too
        long."""
        try:
            *_, last, _ = b"", *os.read(self._heartbeats, PIPE_BYTES).split(b"\n")
        except BlockingIOError:
            last = b""
        self._silent = 0.0 if last else self._silent + self._timeouts.poll
        self._stillness.poll(msgspec.json.decode(last, type=RankState) if last else None)
        state = self._stillness.state
        limit = self._timeouts.start if state is None else state.limit_s(self._timeouts.silence)
        if self.status is None and self._silent >= limit:
            last_seen = "" if state is None else f"; its last heartbeat said: {state}"
            raise all_ended(f"{self.name} has not run for {self._silent:.0f} s: it was stopped, or hangs{last_seen}")

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Kill the rank, if it still runs."""
        self._process.kill()
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            logger.error("%s (process %d) was killed and does not end", self.name, self._process.pid)
        os.close(self._heartbeats)


def run_ranks(
    command: Sequence[str],
    count: int,
    stop: threading.Event,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    hosts: Hosts | None = None,
    activity: Activity | None = None,
) -> None:
    """Run `command` as `count` ranks on this machine, together with the ranks of the other `hosts`, until all have
    ended with status 0. `activity` shows what this process does. All ranks have ended when this returns or raises.

    Raises StoppedError: `stop` was set before all ranks were done. Raises RanksError: a rank died, hung, was asked to
    stop when the others were not, or did not stop in time. Raises ConfigError: a rank cannot be configured, or the
    hosts cannot train together.
    """
    hosts = hosts or OneHost(count, timeouts)
    reason, final = "its launcher ended", False
    try:
        meeting = hosts.meet(stop)
        with ExitStack() as stack:
            ranks = [stack.enter_context(closing(_Rank(command, each, meeting, timeouts))) for each in range(count)]
            _watch(ranks, stop, timeouts, hosts, activity or Activity())
        reason = ""
    except StoppedError:
        reason = ""
        raise
    except AsyncrlError as error:
        reason, final = str(error), isinstance(error, ConfigError | TooManyFailuresError)
        raise
    finally:
        hosts.finish(reason, final)


def _watch(ranks: Sequence[_Rank], stop: threading.Event, timeouts: Timeouts, hosts: Hosts, activity: Activity) -> None:
    stopping: float | None = None
    activity.enter("watch")
    while True:
        well = (None, 0) if stopping is None else (None, 0, EXIT_STOPPED)
        failed = next((rank for rank in ranks if rank.status not in well), None)
        if failed is not None and stopping is None:
            raise _failure(ranks, timeouts, hosts)
        if all(rank.status == 0 for rank in ranks):
            return
        # If a rank fails while all are stopping, the other ranks would wait for it forever.
        if failed is not None or all(rank.status is not None for rank in ranks):
            raise StoppedError("the ranks were asked to stop before they were done")
        states = [rank.state for rank in ranks if rank.state is not None]
        activity.advance()
        activity.unfinished = sorted({what for each in states for what in each.unfinished})
        if states:
            _show(states[0], activity)
        stops = hosts.report(states, stop.is_set()) or stop.is_set()
        if stops and stopping is None:
            stopping = 0.0
            for rank in ranks:
                rank.terminate()
        time.sleep(timeouts.poll)
        if stopping is not None and not activity.unfinished:
            stopping += timeouts.poll
            if stopping > timeouts.stop:
                raise RanksError(f"the ranks did not stop within {timeouts.stop:.0f} s, and were killed")
        for rank in ranks:
            rank.check_heartbeat()
        worst = max(ranks, key=lambda rank: rank.silent_s)
        is_silent = worst.silent_s > SILENT_BEATS * timeouts.heartbeat
        activity.miss(worst.name if is_silent else "", worst.silent_s)


def _show(first: RankState, activity: Activity) -> None:
    """Report the activity of the first rank as this process's own."""
    if first.phase != activity.phase:
        activity.enter(first.phase)
    activity.work = first.work


def _failure(ranks: Sequence[_Rank], timeouts: Timeouts, hosts: Hosts) -> AsyncrlError:
    """Wait for other ranks to end by themselves, unless a rank has already shown the true reason. Then return the error
    for which all ranks must end. Raises RanksError: another host reports the reason."""
    first = min((rank for rank in ranks if rank.status), key=lambda rank: rank.status not in CAUSES)
    left = 0.0 if first.status in CAUSES else timeouts.others
    while left > 0 and (hosts.several or any(rank.status is None for rank in ranks)):
        if hosts.report([], False) and first.status == EXIT_STOPPED:
            return StoppedError("the ranks of another host were asked to stop")
        time.sleep(timeouts.poll)
        left -= timeouts.poll
    for rank in ranks:
        if rank.status == EXIT_USAGE:
            return ConfigError(f"{rank.name} cannot run; its message is above")
        if rank.status == EXIT_HOPELESS:
            return TooManyFailuresError(f"{rank.name} has ended the run; its message is above")
    status = first.status or 0
    if status == EXIT_STOPPED:
        return all_ended(f"{first.name} was asked to stop, but no other rank was")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return all_ended(f"{first.name} {how}")
