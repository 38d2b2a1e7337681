"""The learner's ranks as processes of this machine: started together, watched, and ended together.

The process that starts the ranks is not one of them. The ranks meet in a file of a folder that only this user can
enter, so no port is open for their rendezvous. Each rank writes heartbeats into a pipe of its own, which tell what its
main thread does. A rank without heartbeats is stopped or hangs. A rank with heartbeats may be stuck: see `activity`. A
rank whose pipe has no reader ends itself. Linux also kills the ranks when the process that started them ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from asyncrl.config.load import EXIT_HOPELESS, EXIT_STOPPED, EXIT_USAGE
from asyncrl.errors import AsyncrlError, ConfigError, StoppedError, TooManyFailuresError
from asyncrl.learner.activity import Activity, RankState, find_stuck
from asyncrl.machine.child import ending_with_parent
from asyncrl.machine.process import WORKER_VARIABLE

logger = logging.getLogger(__name__)

VARIABLE = "ASYNCRL_RANK"
"""The environment variable in which a rank gets its membership, as JSON."""
PIPE_BYTES = 1 << 16
"""As many as a pipe holds."""
KILLED_S = 10.0
"""How long to wait for a process that was killed: one that hangs in the kernel may never end."""


class RanksError(AsyncrlError):
    """A rank died, hung or did not stop, and all ranks were ended; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. They are counted in polls, so that no rank is blamed for a time in which this process did not run."""

    poll: float = 0.25
    heartbeat: float = 1.0
    """Between two heartbeats of a rank."""
    start: float = 300.0
    """Until the first heartbeat of a rank, which loads libraries before: a minute on a cold network disk."""
    silence: float = 40.0
    """Without a heartbeat, after which a rank hangs."""
    stuck: float = 1800.0
    """Without progress of its main thread, after which a rank hangs."""
    others: float = 5.0
    """For the other ranks to end once one has failed: one of them may have the true reason."""
    stop: float = 30.0
    """For all ranks to end once they are asked to."""

    @staticmethod
    def within(limit_s: float) -> Timeouts:
        """Those with which a rank that hangs is found within about `limit_s` once it has started."""
        return Timeouts(silence=min(Timeouts().silence, limit_s), stuck=limit_s)


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank knows of its group: its number, how many there are, the file in which they meet, its pipe for
    heartbeats, and the seconds between two."""

    rank: int
    size: int
    rendezvous: str
    pipe: int
    interval_s: float

    @staticmethod
    def of_this_process() -> Membership | None:
        """What `run_ranks` gave this process, or None where it was started otherwise."""
        given = os.environ.get(VARIABLE)
        return Membership(**json.loads(given)) if given else None

    def start_heartbeat(self, activity: Activity) -> None:
        """Write heartbeats from now on. Kills this process once nobody reads them."""
        threading.Thread(target=self._write_heartbeats, args=[activity], name="heartbeat", daemon=True).start()

    def _write_heartbeats(self, activity: Activity) -> None:
        try:
            while True:
                os.write(self.pipe, msgspec.json.encode(activity.state(self.rank)) + b"\n")
                time.sleep(self.interval_s)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    """One rank, running since it was made."""

    def __init__(self, command: Sequence[str], rank: int, size: int, rendezvous: Path, timeouts: Timeouts) -> None:
        self.name = f"rank {rank} of {size}"
        self._timeouts = timeouts
        self._heartbeats, write = os.pipe()
        os.set_blocking(self._heartbeats, False)
        membership = Membership(rank, size, str(rendezvous), write, timeouts.heartbeat)
        variables = {VARIABLE: json.dumps(asdict(membership)), WORKER_VARIABLE: f"learner-{rank}"}
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                pass_fds=[write],
                preexec_fn=ending_with_parent(signal.SIGKILL),
            )
        except OSError:
            os.close(self._heartbeats)
            raise
        finally:
            os.close(write)
        self._silent = 0.0
        self._state: RankState | None = None
        self._still = 0.0
        logger.info("%s is process %d", self.name, self._process.pid)

    @property
    def status(self) -> int | None:
        """Its exit status, minus a signal's number where one killed it; None while it runs."""
        return self._process.poll()

    @property
    def state(self) -> RankState | None:
        """What its main thread did at its last heartbeat; None before the first one and after its end."""
        if self._state is None or self.status is not None:
            return None
        return msgspec.structs.replace(self._state, still_s=self._still)

    def check_heartbeat(self) -> None:
        """Call this at every poll. Raises RanksError: it runs, and had no heartbeat for too long."""
        try:
            *_, last, _ = b"", *os.read(self._heartbeats, PIPE_BYTES).split(b"\n")
        except BlockingIOError:
            last = b""
        self._silent = 0.0 if last else self._silent + self._timeouts.poll
        self._still += self._timeouts.poll
        if last:
            state = msgspec.json.decode(last, type=RankState)
            if self._state is None or state.advances != self._state.advances or state.waits:
                self._still = 0.0
            self._state = state
        limit = self._timeouts.silence if self._state is not None else self._timeouts.start
        if self.status is None and self._silent >= limit:
            raise RanksError(
                f"{self.name} has not run for {self._silent:.0f} s: it was stopped, or hangs; all ranks were ended"
                + (f"; its last heartbeat: {self._state}" if self._state is not None else "")
            )

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            logger.error("%s (process %d) was killed and does not end", self.name, self._process.pid)
        os.close(self._heartbeats)


def run_ranks(command: Sequence[str], size: int, stop: threading.Event, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
    """Run `command` as `size` ranks until all have ended with status 0.

    Raises StoppedError: `stop` was set before all were done. Raises RanksError: one died, hung, was asked to stop
    alone, or did not stop in time. Raises ConfigError: one cannot be configured. All have ended when this returns or
    raises. If this process is killed, the ranks are killed too.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-ranks-") as folder, ExitStack() as stack:
        meeting = Path(folder) / "rendezvous"
        ranks = [stack.enter_context(closing(_Rank(command, rank, size, meeting, timeouts))) for rank in range(size)]
        _watch(ranks, stop, timeouts)


def _watch(ranks: Sequence[_Rank], stop: threading.Event, timeouts: Timeouts) -> None:
    stopping: float | None = None
    while True:
        well = (None, 0) if stopping is None else (None, 0, EXIT_STOPPED)
        failed = next((rank for rank in ranks if rank.status not in well), None)
        if failed is not None and stopping is None:
            raise _failure(failed, ranks, timeouts)
        if all(rank.status == 0 for rank in ranks):
            return
        # If a rank fails while all are stopping, the others would wait for it for ever.
        if failed is not None or all(rank.status is not None for rank in ranks):
            raise StoppedError("the ranks were asked to stop before they were done")
        if stopping is None and stop.is_set():
            stopping = 0.0
            for rank in ranks:
                rank.terminate()
        time.sleep(timeouts.poll)
        if stopping is not None:
            stopping += timeouts.poll
            if stopping > timeouts.stop:
                raise RanksError(f"the ranks did not stop within {timeouts.stop:.0f} s, and were killed")
        for rank in ranks:
            rank.check_heartbeat()
        stuck = find_stuck([rank.state for rank in ranks if rank.state is not None], timeouts.stuck)
        if stuck is not None:
            raise RanksError(f"{stuck}; all ranks were ended")


def _failure(first: _Rank, ranks: Sequence[_Rank], timeouts: Timeouts) -> AsyncrlError:
    """Why the ranks must end, after the others had time to end by themselves."""
    left = timeouts.others
    while left > 0 and any(rank.status is None for rank in ranks):
        time.sleep(timeouts.poll)
        left -= timeouts.poll
    for rank in ranks:
        if rank.status == EXIT_USAGE:
            return ConfigError(f"{rank.name} cannot run; its message is above")
        if rank.status == EXIT_HOPELESS:
            return TooManyFailuresError(f"{rank.name} has ended the run; its message is above")
    status = first.status or 0
    if status == EXIT_STOPPED:
        return RanksError(f"{first.name} was asked to stop, alone; all ranks were ended")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return RanksError(f"{first.name} {how}; all ranks were ended")
