"""Prepares published versions for receivers: computes the checksums of each version, and the delta that leads to it
from the version before.

Preparation has its own threads, so it delays neither training nor a transfer. Host memory holds the last version, a
second one while the two are compared, and the newest one that waits for its turn.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from asyncrl.errors import WeightsError
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.weights.canary import Canary
from asyncrl.weights.delta import Delta, diff, same_layout
from asyncrl.weights.manifest import DTYPES, MAX_CHUNK_BYTES, WeightSnapshot, dtype_name, take_snapshot
from asyncrl.weights.threads import NewestOnly

logger = logging.getLogger(__name__)


class Preparation:
    """Prepares versions and calls `offer` with each, and with the delta that leads to it if there is one.

    `offer` is called in a thread of this object. A version is skipped if a newer one comes before its preparation
    begins.

    `measured` describes the last version that was prepared: its bytes, the bytes of its delta, the share of elements
    that the delta changes (density), and the seconds of the preparation. `spans` records each preparation.
    """

    def __init__(
        self,
        offer: Callable[[WeightSnapshot, Delta | None], object],
        chunk_bytes: int,
        deltas: bool,
        threads: int,
        spans: Spans | None = None,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise WeightsError(f"chunk_bytes is {chunk_bytes}; it must be 1 to {MAX_CHUNK_BYTES}")
        self.measured: dict[str, float] = {}
        self._offer = offer
        self._chunk_bytes = chunk_bytes
        self._deltas = deltas
        self._spans = spans or NoSpans()
        self._newest = -1
        self._last: WeightSnapshot | None = None
        self._versions = NewestOnly("weights-preparing")
        self._tensors = ThreadPoolExecutor(threads, thread_name_prefix="weights-tensors")

    def begin(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None = None) -> None:
        """Begin to prepare `tensors` as `version`. The tensors must be on the CPU, and never change again.

        Raises WeightsError: the version is not newer than the last, or a tensor cannot travel.
        """
        if version <= self._newest:
            raise WeightsError(f"version {version} cannot follow {self._newest}: a version never moves backwards")
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in DTYPES:
                raise WeightsError(f"{name} is {tensor.dtype} on {tensor.device}; move it to the CPU as {list(DTYPES)}")
        self._newest = version
        self._versions.begin(partial(self._prepare, version, dict(tensors), canary)).add_done_callback(_log_failure)

    def close(self) -> None:
        """Return once the version that is being prepared is complete."""
        self._versions.close()
        self._tensors.shutdown(cancel_futures=True)

    def _prepare(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None) -> None:
        started = time.perf_counter()
        with self._spans.span("prepare", "versions", version=version):
            snapshot = take_snapshot(version, tensors, self._chunk_bytes, self._tensors.map, canary)
            try:
                delta = self._delta_to(snapshot)
            except Exception:  # Memory may be short. Without a delta, receivers get the whole version.
                logger.exception("no delta to version %d could be computed", version)
                delta = None
        self._last = snapshot
        measured = {"bytes": float(snapshot.manifest.nbytes), "prepare_s": time.perf_counter() - started}
        if delta is not None:
            elements = sum(math.prod(spec.shape) for spec in snapshot.manifest.tensors)
            measured["delta_bytes"] = float(len(delta.payload))
            measured["density"] = delta.header.changed / max(1, elements)
        self.measured = measured
        self._offer(snapshot, delta)

    def _delta_to(self, snapshot: WeightSnapshot) -> Delta | None:
        last = self._last
        if not self._deltas or last is None or not same_layout(last.manifest, snapshot.manifest):
            return None
        return diff(last, snapshot, self._tensors.map)


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("a version was not prepared, receivers keep the one before", exc_info=error)
