"""A push: one version from the learner, bucket by bucket, to every way in which engines may take it.

A version is kept on the host in any case: pulls, folders and fallbacks are served from there. What one way cannot do
never holds up the others, and none waits for an engine longer than the weights' timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import Bucket, Filled, on_host
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.manifest import check_covers
from asyncrl.weights.publisher import Publisher


class Push:
    """Pushes versions whose tensors must have the names and shapes in `expected`: those of the engines' model."""

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        publisher: Publisher,
        broadcaster: Broadcaster | None = None,
        folders: FolderWriter | None = None,
    ) -> None:
        self._expected = expected
        self._publisher = publisher
        self._broadcaster = broadcaster
        self._folders = folders

    @property
    def measured(self) -> dict[str, float]:
        """What is known of the last push that was prepared, for the learner's metrics."""
        values = dict(self._publisher.measured)
        if self._broadcaster is not None:
            values["broadcasts"] = float(self._broadcaster.broadcasts)
            values["broadcast_failures"] = float(self._broadcaster.failures)
        if self._folders is not None:
            values["folder_failures"] = float(self._folders.failures)
        return values

    def publish(self, version: int, plan: Sequence[Bucket], buckets: Iterable[Filled]) -> None:
        """Offer `version`, whose tensors come in `buckets` as `plan` says.

        Raises WeightsError, before the first bucket is taken: a tensor is missing, unknown or misshapen.
        """
        shapes = {entry.name: entry.shape for bucket in plan for entry in bucket.entries}
        check_covers(version, shapes, self._expected)
        tensors = self._take(version, plan, buckets)
        self._publisher.publish(version, tensors)
        if self._folders is not None:
            self._folders.write(version, tensors)

    def close(self) -> None:
        for part in (self._broadcaster, self._folders, self._publisher):
            if part is not None:
                part.close()

    def _take(self, version: int, plan: Sequence[Bucket], buckets: Iterable[Filled]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        cast = self._broadcaster
        if cast is not None:
            cast.begin(version, plan)
        for filled in buckets:
            if cast is not None:
                cast.start(filled)
            tensors |= on_host(filled)
            if cast is not None and filled.flat.is_cuda:
                cast.wait()
        if cast is not None:
            cast.commit()
        return tensors
