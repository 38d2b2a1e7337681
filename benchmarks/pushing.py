"""The learner's side of pushes in a separate process, and the wait for the notice of a push on the engine's side."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio

from asyncrl.types import RunIdentity
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import Bucket, GatheredBucket, plan_buckets
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.group import BACKENDS, WeightGroup, gpu_of, open_store
from asyncrl.weights.manifest import TensorSpec, dtype_name, new_bytes
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import OpenRoute
from asyncrl.weights.server import WeightServer
from asyncrl.weights.transfers import Broadcasts
from benchmarks.copies import broadcast_seconds, pour
from benchmarks.shapes import make_model

TIMEOUT_S = 60.0
OWN_RUN = RunIdentity("benchmark")


def filled(weights: Mapping[str, torch.Tensor], plan: Sequence[Bucket]) -> Iterator[GatheredBucket]:
    """Fill the buckets as the learner does for a model that is not sharded."""
    device = next(iter(weights.values())).device
    shared = new_bytes(max(each.nbytes for each in plan), device)
    for bucket in plan:
        part = shared[: bucket.nbytes] if shared.is_cuda else new_bytes(bucket.nbytes)
        for name, view in bucket.views(part).items():
            view.copy_(weights[name])
        yield GatheredBucket(bucket, part)


class Learner:
    """The learner's side in a separate process, which pushes a model's weights in bf16 on request."""

    def __init__(self, shape: str, device: str, folder: Path, bucket_bytes: int) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, shape, device, folder, bucket_bytes), daemon=True
        )
        self.process.start()
        self._pipe = ours
        self.endpoint, self.port, self.store_port, self.nbytes = ours.recv()

    def push(self, version: int, way: str) -> None:
        """Begin to push, and return immediately. `way` is a channel of weights, or one of these: `gathered` is
        `distributed` with the buckets filled beforehand, and `gloo` only broadcasts as many bytes from memory."""
        self._pipe.send((version, way))

    def done(self) -> dict[str, float]:
        """Wait for the learner's part. Returns its seconds and the push's own measurements."""
        answer: dict[str, float] = self._pipe.recv()
        return answer

    def close(self) -> None:
        self._pipe.send(None)
        self.process.join()


def serve(pipe: Connection, shape: str, device: str, folder: Path, bucket_bytes: int) -> None:
    """Run the process of `Learner`. Between two versions one in a hundred weights changes."""
    torch.set_num_threads(1)
    model = make_model(shape, torch.bfloat16, device)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(each.shape) for name, each in weights.items()}
    entries = [TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in weights.items()]
    plan = plan_buckets(entries, bucket_bytes)
    broadcasts = Broadcasts(BACKENDS[torch.device(device).type], gpu_of(torch.device(device)))
    server = WeightServer(
        "127.0.0.1", 0, zmq.Context(), history=4, threads=min(8, os.cpu_count() or 1), broadcasts=broadcasts
    )
    broadcaster = Broadcaster(server, "127.0.0.1", torch.device(device), TIMEOUT_S)
    folders = FolderWriter(folder, lambda aside: None, OWN_RUN)
    cast = Publisher(shapes, server, broadcaster)
    ways = {
        "zmq": Publisher(shapes, server),
        "distributed": cast,
        "gathered": cast,
        "disk": Publisher(shapes, server, None, folders),
    }
    nbytes = sum(each.nbytes for each in weights.values())
    store, store_port = open_store("127.0.0.1", TIMEOUT_S)
    bare: WeightGroup | None = None
    resident = torch.ones(nbytes, dtype=torch.uint8)
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        threading.Thread(target=pour, args=(plain, nbytes), daemon=True).start()
        pipe.send((server.endpoint, plain.getsockname()[1], store_port, nbytes))
        while (told := pipe.recv()) is not None:
            version, way = told
            if way == "gloo":
                bare = bare or bare_gloo(store, 0)
                broadcast_seconds(bare, resident, bucket_bytes)
                pipe.send({})
                continue
            for each in weights.values():
                each.view(-1)[version::100] += 0.5
            buckets = filled(weights, plan)
            if way == "gathered":
                buckets = iter(list(buckets))
            begun = time.perf_counter()
            ways[way].publish(version, plan, buckets)
            seconds = time.perf_counter() - begun
            while server.offered < version:
                time.sleep(0.001)
            pipe.send({"learner_s": seconds, "offered_s": time.perf_counter() - begun, **ways[way].measured})
    if bare is not None:
        bare.close()
    broadcaster.close()
    folders.close()
    server.close()


def bare_gloo(store: torch.distributed.Store, rank: int) -> WeightGroup:
    return WeightGroup(store, "bare", rank, 2, torch.device("cpu"), "127.0.0.1", TIMEOUT_S)


async def until_called(link: OpenRoute, holds: int) -> Any:
    while (manifest := await link.newer_than(holds)) is None:
        pass
    return manifest
