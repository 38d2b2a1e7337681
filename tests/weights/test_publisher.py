"""A push to each of its routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from asyncrl.weights.buckets import GatheredBucket, flatten, plan_buckets
from asyncrl.weights.canary import Canary
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.manifest import specs_of
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.server import WeightServer
from tests.weights.fakes import shapes, some_tensors


class Recorder:
    """A server or a writer of folders that remembers the canaries of its versions."""

    def __init__(self) -> None:
        self.canaries: dict[int, Canary | None] = {}

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None = None) -> None:
        self.canaries[version] = canary

    write = publish


def test_the_canary_of_a_version_goes_to_those_who_pull_and_to_those_who_read_folders() -> None:
    tensors, canary = some_tensors(), Canary((1, 2), (-0.5,), "float32")
    plan = plan_buckets(specs_of(tensors), 512)
    server, folders = Recorder(), Recorder()
    publisher = Publisher(shapes(tensors), cast(WeightServer, server), folders=cast(FolderWriter, folders))
    publisher.publish(3, plan, [GatheredBucket(bucket, flatten(bucket, tensors)) for bucket in plan], canary)
    assert server.canaries == folders.canaries == {3: canary}
