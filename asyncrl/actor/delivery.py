"""Delivers outcomes to the replay: trajectories with their images, and failures with their reasons."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.episode.images import OutgoingImages
from asyncrl.network.throttle import ErrorLogger
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Trajectory

log = logging.getLogger(__name__)

EpisodeOutcome = Trajectory | str
"""The trajectory of a ticket's episode, or the reason why the episode failed."""

InThread = Callable[..., Awaitable[Any]]
"""Calls its first argument with the remaining arguments in a thread, and waits for the result."""


class Delivery:
    """Sends outcomes to `sink` and counts them in `metrics`. `outgoing` has the images of the trajectories."""

    def __init__(
        self, sink: ReplayClient, metrics: RolloutMetrics, outgoing: OutgoingImages, in_thread: InThread
    ) -> None:
        self._sink = sink
        self._metrics = metrics
        self._outgoing = outgoing
        self._in_thread = in_thread
        self._error_logger = ErrorLogger(log)

    async def deliver(self, outcomes: Mapping[str, EpisodeOutcome]) -> None:
        """Deliver the outcome of each ticket. All outcomes are durable at the replay when this returns."""
        trajectories = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Trajectory)}
        failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
        failed = len(failures)
        images: dict[bytes, bytes] = {}
        for name in outcomes:
            images |= self._outgoing.take(name)
        answers = await self._in_thread(self._sink.put_all, list(trajectories.values()), images)
        for (name, trajectory), answer in zip(trajectories.items(), answers, strict=True):
            if isinstance(answer, str):
                self._metrics.delivered(trajectory)
            else:
                self._error_logger.exception(f"the outcome of {name} was refused: {answer}", answer)
                self._metrics.refused()
                # A refused trajectory becomes a failure with a reason, so that the replay issues its ticket again.
                failures[name] = f"refused: {answer}"
        if failures:
            await self._in_thread(self._sink.fail_all, failures)
        self._metrics.failed(failed)
