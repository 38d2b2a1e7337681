"""Pushes of two real shapes from one GPU to another: see weight_push."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio

from asyncrl.engine.fleet.update import on_device
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.folders import tensors_of
from asyncrl.weights.receiver import OpenRoute
from asyncrl.weights.requests import Requests
from asyncrl.weights.zmq_route import ZmqRoute
from benchmarks.copies import tensor_copy_rate
from benchmarks.pushing import OWN_RUN, TIMEOUT_S, Learner, until_called


async def on_gpus(rounds: int) -> dict[str, Any]:
    """Push from cuda:0 in the learner's process to cuda:1 in this one, since `distributed` needs two GPUs."""
    result: dict[str, Any] = {}
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    for shape in ("0.6B", "4B"):
        with tempfile.TemporaryDirectory() as folder:
            learner = Learner(shape, "cuda:0", Path(folder) / "w", 512 << 20)
            result[shape] = await pushed_to_gpu(learner, device, rounds, Path(folder) / "w")
            learner.close()
        print(shape, result[shape], flush=True)
    result["device_copy_gigabytes_per_s"] = link_limit(device)
    return result


async def pushed_to_gpu(learner: Learner, device: torch.device, rounds: int, directory: Path) -> dict[str, Any]:
    """Seconds from the begin of the push until all tensors are on `device`."""
    context = zmq.asyncio.Context()
    cast = DistributedRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S), device, TIMEOUT_S)
    links: dict[str, OpenRoute] = {
        "distributed": cast,
        "zmq": ZmqRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S), deltas=False),
        "delta": ZmqRoute(Requests(learner.endpoint, context, timeout_s=TIMEOUT_S)),
        "disk": DiskRoute(directory, OWN_RUN),
    }
    version, rows = 0, {}
    for way, link in links.items():
        taken, broadcasts, answer = [], [], {}
        for _ in range(rounds + 1):
            calling = asyncio.create_task(until_called(link, version - 1))
            await asyncio.sleep(0.2)
            begun = time.perf_counter()
            learner.push(version, "zmq" if way == "delta" else way)
            manifest = await calling
            called = time.perf_counter()
            tensors = await link.fetch(manifest)
            copied = on_device(tensors_of(tensors), device)
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - begun)
            broadcasts.append(time.perf_counter() - called)
            del tensors, copied
            answer = await asyncio.to_thread(learner.done)
            version += 1
        rows[way] = {
            "push_s": round(statistics.median(taken[1:]), 4),
            "first_push_s": round(taken[0], 3),
            "transfer_gigabytes_per_s": round(learner.nbytes / statistics.median(broadcasts[1:]) / 1e9, 2),
            "learner_s": round(answer["learner_s"], 4),
            "prepare_s": round(answer["prepare_s"], 4),
            "pushes_s": [round(each, 3) for each in taken],
        }
        if way == "delta":
            rows[way]["delta_bytes"], rows[way]["density"] = answer["delta_bytes"], round(answer["density"], 4)
        print(way, rows[way], flush=True)
    for link in links.values():
        link.reset()
    return {"gigabytes": round(learner.nbytes / 1e9, 2), "ways": rows}


def link_limit(device: torch.device) -> float:
    """GB/s of a plain copy of 1 GB from the other GPU."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda:0")
    return round(tensor_copy_rate(source, torch.empty_like(source, device=device)), 1)
