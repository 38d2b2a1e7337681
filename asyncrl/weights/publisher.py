"""A push: the learner gives one version, bucket by bucket, to every route by which engines may get it.

Each version is copied to host memory, from which the server and the folders take it. A route that fails does not stop
the other routes, and no route waits for an engine longer than weights.timeout_s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import Bucket, GatheredBucket, on_host
from asyncrl.weights.canary import Canary
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.manifest import check_covers
from asyncrl.weights.server import WeightServer


class Publisher:
    """Publishes versions. Their tensors must have the names and shapes in `expected`, which are those of the engines'
    model."""

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        server: WeightServer,
        broadcaster: Broadcaster | None = None,
        folders: FolderWriter | None = None,
    ) -> None:
        self._expected = expected
        self._server = server
        self._broadcaster = broadcaster
        self._folders = folders

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of the last version that the server has prepared, and the counts of broadcasts and failures."""
        values = dict(self._server.measured)
        if self._broadcaster is not None:
            values["broadcasts"] = float(self._broadcaster.broadcasts)
            values["broadcast_failures"] = float(self._broadcaster.failures)
        if self._folders is not None:
            values["folder_failures"] = float(self._folders.failures)
        return values

    def publish(
        self, version: int, plan: Sequence[Bucket], buckets: Iterable[GatheredBucket], canary: Canary | None = None
    ) -> None:
        """Offer `version` with its `canary`. The tensors come in the `buckets` of `plan`.

        Raises WeightsError, before the first bucket is taken: a tensor is missing, unknown or misshapen.
        """
        shapes = {entry.name: entry.shape for bucket in plan for entry in bucket.entries}
        check_covers(version, shapes, self._expected)
        if self._broadcaster is not None:
            buckets = self._broadcaster.through(version, plan, buckets, canary)
        tensors = {name: tensor for gathered in buckets for name, tensor in on_host(gathered).items()}
        self._server.publish(version, tensors, canary)
        if self._folders is not None:
            self._folders.write(version, tensors, canary)

    def close(self) -> None:
        for part in (self._broadcaster, self._folders, self._server):
            if part is not None:
                part.close()
