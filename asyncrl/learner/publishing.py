"""Publishes the policy. Version v has the weights after v * `publish_every` steps, or those of the run's last step if
the run has fewer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.checkpoint.gathering import gather, plan_gather
from asyncrl.learner.model.canary import CanarySettings, canary_of
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.stop_request import StopRequest
from asyncrl.machine.long_work import tracked
from asyncrl.weights.buckets import Bucket, GatheredBucket
from asyncrl.weights.canary import Canary
from asyncrl.weights.publisher import Publisher


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of a run of `total_steps` that publishes after every `publish_every` steps. Version 0 has the first
    weights, and the last weights always have a version of their own."""

    publish_every: int
    total_steps: int

    def after(self, steps: int) -> int:
        """Return the version that is served after `steps` steps."""
        return -(-steps // self.publish_every) if steps == self.total_steps else steps // self.publish_every


@dataclass(frozen=True, slots=True, eq=False)
class Publishing:
    """Publishes the weights of `policy` in pieces (buckets) of `bucket_bytes`, each version with a canary if `canary`
    is set. The canary has log-probs with which engines check the weights that they got. Only rank 0 has a `publisher`.
    If a recorded run is trained again, no rank has a publisher."""

    policy: Policy
    ranks: Ranks
    replay: BatchSource
    publisher: Publisher | None
    dtype: torch.dtype
    bucket_bytes: int
    canary: CanarySettings | None
    stop: StopRequest

    def publish(self, version: int) -> None:
        """Publish the current weights, and tell the replay. Raises StoppedError on every rank: a rank was asked to
        stop; WeightsError: the log-probs of the canary are not finite."""
        weights = self.policy.weight_format
        steps = plan_gather(weights, self.dtype, self.bucket_bytes)
        gathered = gather(self.policy.model, steps, weights, self.ranks)
        buckets = tracked(gathered, f"publishing version {version}", len(steps), "buckets", self.ranks.activity)
        canary = canary_of(self.policy, version, self.canary, self.ranks)
        self.stop.together(self._push, version, [step.bucket for step in steps], buckets, canary)

    def _push(
        self, version: int, plan: Sequence[Bucket], buckets: Iterator[GatheredBucket], canary: Canary | None
    ) -> None:
        with self.ranks.activity.working():
            if self.publisher is None:
                # All ranks gather the weights together. A rank that publishes none must still read all buckets.
                deque(buckets, maxlen=0)
            else:
                self.publisher.publish(version, plan, buckets, canary)
        if self.publisher is not None:
            self.replay.published(version)

    def values(self) -> dict[str, float]:
        """Return the metrics of the newest publish."""
        measured = {} if self.publisher is None else self.publisher.measured
        return {f"weights/{name}": value for name, value in measured.items()}
