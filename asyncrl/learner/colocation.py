"""Lets the learner and inference servers use the same GPUs in turns (cluster.colocated). machine/gpu_lock.py has the
protocol.

While the learner has the GPUs, its models, gradients and optimizer moments are on them. Otherwise these tensors are in
host memory, and must not be read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asyncrl.errors import StoppedError
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import Phases
from asyncrl.learner.trainer import Trainer
from asyncrl.machine.gpu_lock import LearnerLock
from asyncrl.machine.host_memory import OnHost

logger = logging.getLogger(__name__)

POLL_S = 0.02
NOTICE_S = 60.0
STOPPED_S = 60.0
"""The maximum number of seconds for which a stopped learner waits for the GPUs, which it needs to save the finished
steps."""


class SharedGpus:
    """The GPUs of one rank. All ranks acquire and release their GPUs together. Without a `lock` the GPUs always belong
    to the learner."""

    def __init__(self, ranks: Ranks, lock: LearnerLock | None, stop: threading.Event) -> None:
        self.shares = lock is not None
        self._ranks = ranks
        self._lock = lock
        self._stop = stop
        self.has_gpus = lock is None
        """True if the models are on the GPUs. A thread that changes this holds `stopping.lock`."""
        self._host = OnHost(ranks.device)

    def close(self) -> None:
        """Close the lock, which releases the GPUs. The end of this process does the same."""
        if self._lock is not None:
            self._lock.close()

    def acquire(self, phases: Phases) -> None:
        """Wait for the GPUs, and copy the models back to them. Raises StoppedError: the learner was asked to stop."""
        if self._lock is None or self.has_gpus:
            return
        with phases("release"):
            self._lock.ask()
            self._ranks.together(lambda: self._wait(self._stop.is_set))
        with phases("onload"):
            self._put_back()

    def release(self, trainer: Trainer, version: int, phases: Phases) -> None:
        """Copy the models to the host, and release the GPUs to the servers. The servers can then load `version`."""
        if self._lock is None:
            return
        with phases("offload"), self._ranks.stopping.lock:
            self.has_gpus = False
            for each in (each for module in _modules(trainer) for each in module.modules()):
                if isinstance(each, FSDPModule):
                    each.reshard()
            self._host.take(_tensors(trainer))
            # This releases only this rank's lock: another rank that still uses its GPU keeps its own lock.
            self._lock.give_back(version)

    def _put_back(self) -> None:
        # Holds `stopping.lock`, so that no other thread saves half-copied models.
        with self._ranks.stopping.lock:
            self._host.put_back()
            self.has_gpus = True

    def acquire_although_stopped(self) -> bool:
        """Acquire the GPUs for a last checkpoint, within a limited time. Returns True if the models are on the GPUs
        afterwards."""
        if self._lock is None or self.has_gpus:
            return True
        self._lock.ask()
        deadline = time.monotonic() + STOPPED_S
        late = False
        with self._ranks.activity.waiting():
            try:
                self._wait(lambda: time.monotonic() >= deadline)
            except StoppedError:
                late = True
        if self._ranks.any(late):
            logger.warning("the servers kept the GPUs: the steps after the newest checkpoint will be trained again")
            return False
        self._put_back()
        return True

    def _wait(self, gives_up: Callable[[], bool]) -> None:
        """Wait until the servers have freed the GPUs. Only rank 0 waits here: the other ranks return at once, and wait
        for rank 0 in `together`."""
        assert self._lock is not None
        if self._ranks.rank != 0:
            return
        notice = time.monotonic() + NOTICE_S
        while not self._lock.is_ours():
            if gives_up():
                raise StoppedError("stopped while waiting for the GPUs")
            if time.monotonic() >= notice:
                logger.warning("still waiting for the servers to free the GPUs: see the actors' logs")
                notice += NOTICE_S
            time.sleep(POLL_S)


def _modules(trainer: Trainer) -> Iterator[nn.Module]:
    yield from (model.module for model in trainer.models.values())
    if isinstance(trainer.reference, nn.Module):
        yield trainer.reference


def _tensors(trainer: Trainer) -> Iterator[Tensor]:
    for module in _modules(trainer):
        for parameter in module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from module.buffers()
    for model in trainer.models.values():
        for moments in model.moments().values():
            yield from (each for each in moments.values() if isinstance(each, Tensor))
