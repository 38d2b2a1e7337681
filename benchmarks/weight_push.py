"""Measures the speed of weight pushes, the size of a delta, and the pause of an engine.

The learner's side is a separate process. `python -m benchmarks.weight_push` measures the bandwidth of a plain socket,
of bare gloo, and of the zmq, distributed (gloo) and disk channels. It also measures the size of a delta after one step
of AdamW, and a push into an embedded engine that generates meanwhile. `distributed` includes gathering the weights,
while `gathered` and `zmq` begin with the host copy.

`--device cuda` pushes models of two real shapes from one GPU to another. Results go to
benchmarks/results/weight_push.json, or weight_push_cuda.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
import zmq.asyncio

from asyncrl.config.schema import EngineConfig
from asyncrl.types import Sampling
from asyncrl.weights.delta import diff
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.group import join_store
from asyncrl.weights.manifest import new_bytes, take_snapshot
from asyncrl.weights.receiver import OpenRoute, Receiver
from asyncrl.weights.requests import Requests
from asyncrl.weights.zmq_route import ZmqRoute
from benchmarks.copies import broadcast_seconds, socket_seconds, touch
from benchmarks.pushing import OWN_RUN, TIMEOUT_S, Learner, bare_gloo, until_called
from benchmarks.record import write_result
from benchmarks.shapes import make_model
from benchmarks.weight_push_gpu import on_gpus

BUCKET_BYTES = 64 << 20


async def transfer_seconds(link: OpenRoute, holds: int) -> float:
    """Seconds of fetching the newest version, which is already published."""
    while (manifest := await link.newer_than(holds)) is None:
        pass
    begun = time.perf_counter()
    await link.fetch(manifest)
    return time.perf_counter() - begun


async def broadcast_transfer_seconds(learner: Learner, cast: DistributedRoute, version: int, way: str) -> float:
    """Seconds from the call of a push until all tensors have arrived."""
    touch(3 * learner.nbytes)
    calling = asyncio.create_task(until_called(cast, version - 1))
    await asyncio.sleep(0.1)
    learner.push(version, way)
    manifest = await calling
    begun = time.perf_counter()
    await cast.fetch(manifest)
    seconds = time.perf_counter() - begun
    learner.done()
    return seconds


async def bandwidth(learner: Learner, rounds: int, directory: Path) -> dict[str, Any]:
    """GB/s of each channel, measured alternately."""
    context = zmq.asyncio.Context()
    whole = ZmqRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S), deltas=False)
    cast = DistributedRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S), torch.device("cpu"), TIMEOUT_S)
    disk = DiskRoute(directory, OWN_RUN)
    ways = ("socket", "gloo", "zmq", "distributed", "gathered", "disk", "disk_write")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    learner.push(0, "gloo")
    bare = bare_gloo(join_store("127.0.0.1", learner.store_port, TIMEOUT_S), 1)
    broadcast_seconds(bare, new_bytes(learner.nbytes), BUCKET_BYTES)
    learner.done()
    version = -1
    for _ in range(rounds):
        touch(3 * learner.nbytes)
        seconds["socket"].append(socket_seconds(learner.port, learner.nbytes))
        touch(3 * learner.nbytes)
        learner.push(0, "gloo")
        seconds["gloo"].append(broadcast_seconds(bare, new_bytes(learner.nbytes), BUCKET_BYTES))
        learner.done()
        version += 1
        learner.push(version, "zmq")
        learner.done()
        touch(3 * learner.nbytes)
        seconds["zmq"].append(await transfer_seconds(whole, version - 1))
        for way in ("distributed", "gathered"):
            version += 1
            seconds[way].append(await broadcast_transfer_seconds(learner, cast, version, way))
        version += 1
        begun = time.perf_counter()
        learner.push(version, "disk")
        await until_called(disk, version - 1)
        seconds["disk_write"].append(time.perf_counter() - begun)
        learner.done()
        seconds["disk"].append(await transfer_seconds(disk, version - 1))
    bare.close()
    cast.reset()
    whole.reset()
    rates = {name: [learner.nbytes / each / 1e9 for each in taken] for name, taken in seconds.items()}
    return {
        "megabytes": round(learner.nbytes / 1e6, 1),
        "gigabytes_per_s": {name: round(statistics.median(each), 2) for name, each in rates.items()},
        "best_gigabytes_per_s": {name: round(max(each), 2) for name, each in rates.items()},
        **{f"{name}_share_of_socket": share(rates, name) for name in ("gloo", "zmq", "distributed", "gathered")},
    }


def share(rates: Mapping[str, Sequence[float]], name: str) -> float:
    """The median of the rounds' ratios, since other work of the machine slows both sides of a round alike."""
    return round(statistics.median(own / plain for own, plain in zip(rates[name], rates["socket"], strict=True)), 2)


def delta_after_a_step(shape: str, lr: float) -> dict[str, Any]:
    """The delta in bf16 after one step of AdamW on float32 master weights, with the gradient of a batch of tokens."""
    model = make_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def published(version: int) -> Any:
        tensors = {name: each.detach().to(torch.bfloat16) for name, each in model.named_parameters()}
        return take_snapshot(version, tensors, 1 << 22)

    before = published(0)
    ids = torch.randint(0, model.config.vocab_size, (4, 128))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after = published(1)
    begun = time.perf_counter()
    delta = diff(before, after)
    seconds = time.perf_counter() - begun
    tracemalloc.start()
    diff(before, after)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    full, elements = after.manifest.nbytes, after.manifest.nbytes // 2
    return {
        "lr": lr,
        "parameters": elements,
        "density": round(delta.header.changed / elements, 5),
        "full_bytes": full,
        "delta_bytes": len(delta.payload),
        "times_fewer": round(full / len(delta.payload), 1),
        "bytes_per_change": round(len(delta.payload) / max(1, delta.header.changed), 2),
        "diff_s": round(seconds, 3),
        "diff_bytes_per_element": round(peak / elements, 2),
    }


async def pauses(learner: Learner, shape: str, rounds: int, first: int, deltas: bool) -> dict[str, Any]:
    """Push into an embedded engine that has 8 requests. Computes the engine's pause as a share of the push's time."""
    from asyncrl.engine.embedded import EmbeddedEngine

    engine = EmbeddedEngine(
        make_model(shape, torch.bfloat16), EngineConfig(slots=8, max_length=2048), initial_version=-1
    )
    switches = timed_switches(engine)
    context = zmq.asyncio.Context()
    link = ZmqRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S), deltas=deltas)
    following = asyncio.create_task(Receiver([link], engine.expected).run(engine))
    generating: list[asyncio.Task[Any]] = []
    shares, pushes = [], []
    for version in range(first, first + rounds + 1):
        begun = time.perf_counter()
        learner.push(version, "zmq")
        await engine.wait_for_version(version)
        pushed = time.perf_counter() - begun
        await asyncio.to_thread(learner.done)
        while len(switches) <= version - first:
            await asyncio.sleep(0.001)
        if version > first:
            pushes.append(pushed)
            shares.append(switches[version - first] / pushed)
        for task in generating:
            task.cancel()
        prompt = np.arange(16, dtype=np.int32)
        generating = [
            asyncio.create_task(engine.generate(prompt, Sampling(1.0, 2000), (), f"{version}.{i}")) for i in range(8)
        ]
        tokens = engine.stats().tokens
        while engine.stats().tokens < tokens + 80:
            await asyncio.sleep(0.01)
    for task in [*generating, following]:
        task.cancel()
    await engine.close()
    return {
        "push_s": round(statistics.median(pushes), 4),
        "pause_s": round(statistics.median(switches[1:]), 5),
        "pause_share": round(statistics.median(shares), 4),
        "largest_pause_share": round(max(shares), 4),
    }


def timed_switches(engine: Any) -> list[float]:
    """Record the seconds of every later switch to new weights, in which the engine's thread decodes nothing."""
    seconds: list[float] = []
    switch: Callable[..., None] = engine._switch

    def timed(*arguments: Any) -> None:
        begun = time.perf_counter()
        switch(*arguments)
        seconds.append(time.perf_counter() - begun)

    engine._switch = timed
    return seconds


async def on_cpu(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        large = Learner("120M", "cpu", Path(folder) / "large", BUCKET_BYTES)
        result: dict[str, Any] = {"bandwidth": await bandwidth(large, rounds, Path(folder) / "large")}
        large.close()
        result["delta"] = delta_after_a_step("30M", 1e-6)
        result["dense_delta"] = delta_after_a_step("30M", 1e-3)
        for name, deltas in (("zmq", False), ("delta", True)):
            small = Learner("30M", "cpu", Path(folder) / name, BUCKET_BYTES)
            result[f"pause_{name}"] = await pauses(small, "30M", rounds, 0, deltas)
            small.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs two GPUs")
    parser.add_argument("--rounds", type=int, default=5, help="pushes, of which the median is reported")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    result = asyncio.run(on_cpu(options.rounds) if options.device == "cpu" else on_gpus(options.rounds))
    result["load_before"] = round(load, 2)
    device = f"2 x {torch.cuda.get_device_name(0)}" if options.device == "cuda" else None
    path = write_result("weight_push" if options.device == "cpu" else "weight_push_cuda", result, device)
    print(path.read_text())


if __name__ == "__main__":
    main()
