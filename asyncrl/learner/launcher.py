"""The learner's ranks as processes of this machine: started together, watched, and ended together.

The process that starts them is not a rank. They meet in a file of a folder that only this user can enter, so that no
port is open for it. Every rank writes a byte a second into a pipe of its own: a rank that writes none is stopped or
hangs, however long it may otherwise wait for the replay or for other ranks, and a rank whose pipe nobody reads any more
ends itself. Where the kernel is Linux it kills the ranks with the process that started them.
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
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.load import EXIT_STOPPED, EXIT_USAGE
from asyncrl.errors import AsyncrlError, ConfigError, StoppedError
from asyncrl.machine.child import ending_with_parent
from asyncrl.machine.process import WORKER_VARIABLE

logger = logging.getLogger(__name__)

VARIABLE = "ASYNCRL_RANK"
BEAT_S = 1.0
KILLED_S = 10.0
"""How long to wait for a process that was killed: one that hangs in the kernel may never end."""


class RanksError(AsyncrlError):
    """A rank died, hung or did not stop, and all ranks were ended; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds, counted in looks of `every`: while this process does not run either, no rank is to blame."""

    every: float = 0.25
    start: float = 300.0
    """Until the first byte of a rank, which loads libraries before it; a full minute on a cold network disk."""
    silence: float = 40.0
    last_words: float = 5.0
    """For the others once a rank has failed, since theirs may be the reason."""
    stop: float = 30.0


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank knows of its group: its number, how many there are, the file in which they meet, and its pipe."""

    rank: int
    size: int
    rendezvous: str
    heartbeat: int

    @staticmethod
    def of_this_process() -> Membership | None:
        """What `run_ranks` gave this process, or None where it was started otherwise."""
        given = os.environ.get(VARIABLE)
        return Membership(**json.loads(given)) if given else None

    def beat(self) -> None:
        """Show from now on that this process runs, and end it once nobody watches."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        try:
            while True:
                os.write(self.heartbeat, b".")
                time.sleep(BEAT_S)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    """One rank, running since it was made."""

    def __init__(self, command: Sequence[str], rank: int, size: int, rendezvous: Path) -> None:
        self.name = f"rank {rank} of {size}"
        self._heartbeat, write = os.pipe()
        os.set_blocking(self._heartbeat, False)
        membership = {"rank": rank, "size": size, "rendezvous": str(rendezvous), "heartbeat": write}
        variables = {VARIABLE: json.dumps(membership), WORKER_VARIABLE: f"learner-{rank}"}
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                pass_fds=[write],
                preexec_fn=ending_with_parent(signal.SIGKILL),
            )
        except OSError:
            os.close(self._heartbeat)
            raise
        finally:
            os.close(write)
        self._started = False
        self._silent = 0.0
        logger.info("%s is process %d", self.name, self._process.pid)

    @property
    def status(self) -> int | None:
        """Its exit status, minus a signal's number where one killed it; None while it runs."""
        return self._process.poll()

    def listen(self, passed: float) -> None:
        """See whether it has shown itself in the `passed` seconds since the last call."""
        try:
            heard = bool(os.read(self._heartbeat, 4096))
        except BlockingIOError:
            heard = False
        self._started |= heard
        self._silent = 0.0 if heard else self._silent + passed

    def hung(self, patience: Patience) -> str | None:
        """How it hangs, if it does."""
        if self.status is not None or self._silent < (patience.silence if self._started else patience.start):
            return None
        return f"{self.name} has not run for {self._silent:.0f} s: it was stopped, or hangs"

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            logger.error("%s (process %d) was killed and does not end", self.name, self._process.pid)
        os.close(self._heartbeat)


def run_ranks(command: Sequence[str], size: int, stop: threading.Event, patience: Patience | None = None) -> None:
    """Run `command` as `size` ranks until all have ended well.

    Raises StoppedError: `stop` was set before all had done their work. Raises RanksError: one died, hung, was asked to
    stop alone, or did not stop in time. Raises ConfigError: one cannot be configured. All have ended when this returns
    or raises; and should this process be killed, they are killed with it.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-ranks-") as folder, ExitStack() as stack:
        meeting = Path(folder) / "rendezvous"
        ranks = [stack.enter_context(closing(_Rank(command, rank, size, meeting))) for rank in range(size)]
        _watch(ranks, stop, patience or Patience())


def _watch(ranks: Sequence[_Rank], stop: threading.Event, patience: Patience) -> None:
    stopping: float | None = None
    while True:
        well = (None, 0) if stopping is None else (None, 0, EXIT_STOPPED)
        failed = next((rank for rank in ranks if rank.status not in well), None)
        if failed is not None and stopping is None:
            raise _failure(failed, ranks, patience)
        if all(rank.status == 0 for rank in ranks):
            return
        # Once one failed while all were stopping, the others wait for it in vain, and there is nothing left to lose.
        if failed is not None or all(rank.status is not None for rank in ranks):
            raise StoppedError("the ranks were asked to stop before they were done")
        if stopping is None and stop.is_set():
            stopping = 0.0
            for rank in ranks:
                rank.terminate()
        time.sleep(patience.every)
        if stopping is not None:
            stopping += patience.every
            if stopping > patience.stop:
                raise RanksError(f"the ranks did not stop within {patience.stop:.0f} s, and were killed")
        for rank in ranks:
            rank.listen(patience.every)
            if how := rank.hung(patience):
                raise RanksError(f"{how}; all ranks were ended")


def _failure(first: _Rank, ranks: Sequence[_Rank], patience: Patience) -> AsyncrlError:
    """Why the ranks must end. The others get time to end by themselves, since one of them may have the true reason."""
    left = patience.last_words
    while left > 0 and any(rank.status is None for rank in ranks):
        time.sleep(patience.every)
        left -= patience.every
    for rank in ranks:
        if rank.status == EXIT_USAGE:
            return ConfigError(f"{rank.name} cannot run; its message is above")
    status = first.status or 0
    if status == EXIT_STOPPED:
        return RanksError(f"{first.name} was asked to stop, alone; all ranks were ended")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return RanksError(f"{first.name} {how}; all ranks were ended")
