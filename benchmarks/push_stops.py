"""Measures where the time goes while a push stops an SGLang server, step by step.

`python -m benchmarks.push_stops --python PATH` starts a server of random weights with the Python at PATH, on the GPU if
there is one, else on the CPU. It runs the server for each of `--shapes`, and pushes new versions under load, once for
each of `--ways`:

- kept: the server keeps one buffer of the actor open, and repeats the copies of its first load.
- buckets: each push has buckets with handles and names, as for a server that was started without the loader.

The tables have the median milliseconds from the call that stops the server until each step, and of each step itself.
Results go to benchmarks/results/push_stops.json.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.engine.sglang.inside import LOADER
from benchmarks import timed_sglang
from benchmarks.fleets import OpenFleet, Policy, Push, fleet_over, launched
from benchmarks.push_under_load import PushLoad, Traffic
from benchmarks.record import write_result
from benchmarks.shapes import SHAPES, make_model, word_tokenizer

WAYS = ("kept", "buckets")
EARLY_S = 0.001
MOMENTS = (
    *("frontend abort", "scheduler abort", "scheduler pause", "scheduler idle"),
    *("frontend answers", "actor has the answers", "frontend waits", "scheduler update"),
    *("scheduler opens", "scheduler loads", "frontend update", "actor has loaded", "actor continues"),
)
"""The steps in their usual order. `frontend answers` counts from its last call, all others from their first one."""

Stop = tuple[float, float, float, float]
"""The times at which the actor told the server to stop, had the last answer, had loaded the version, and resumed."""
Times = Sequence[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """The median milliseconds of a stop: until each step has ended, and of each step."""

    until: Mapping[str, float]
    lasts: Mapping[str, float]


def read_times(path: Path) -> Times:
    """The steps that the server wrote."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [(step, float(begun), float(ended)) for step, begun, ended in rows]


def measured(stops: Sequence[Stop], times: Times) -> Measured:
    """The medians over all stops."""
    until: dict[str, list[float]] = defaultdict(list)
    lasts: dict[str, list[float]] = defaultdict(list)
    for told, stopped, loaded, continued in stops:
        own: dict[str, tuple[float, float]] = {}
        for step, begun, ended in times:
            if told - EARLY_S <= begun <= loaded and (step not in own or step == "frontend answers"):
                own[step] = begun, ended
        # The scheduler sleeps in this step, so only its begin counts.
        own = {step: (begun, begun if step == "scheduler idle" else ended) for step, (begun, ended) in own.items()}
        actor = {"actor has the answers": stopped, "actor has loaded": loaded, "actor continues": continued}
        own |= {step: (told, at) for step, at in actor.items()}
        for step, (begun, ended) in own.items():
            until[step].append(1000 * (ended - told))
            if step not in actor:
                lasts[step].append(1000 * (ended - begun))
    return Measured(_medians(until), _medians(lasts))


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {step: round(statistics.median(values[step]), 2) for step in MOMENTS if step in values}


async def measure(url: str, policy: Policy, load: PushLoad, way: str, mode: str, times: Path) -> dict[str, Any]:
    """Push under load by one way. Returns the medians."""
    stops: list[Stop] = []
    with tempfile.TemporaryDirectory() as folder:
        context = load.prompt + load.longest
        async with fleet_over([url], policy, context, Push(mode), Path(folder)) as opened:
            if way == "buckets":
                for server in opened.servers:
                    server._end.keeps_none = "the benchmark measures buckets"
            # The first push by a way also makes buffers and connections.
            await opened.fleet.update_weights(1, policy.tensors)
            traffic = Traffic(opened.fleet, load, policy.vocabulary)
            try:
                calm_s = max(load.calm_s, await traffic.settled_s())
                _record(opened, stops)
                for version in range(2, load.pushes + 2):
                    await asyncio.sleep(calm_s)
                    await opened.fleet.update_weights(version, policy.tensors)
                await traffic.end()
            finally:
                traffic.cancel()
            routes = sorted({server.route for server in opened.servers})
    found = measured(stops, read_times(times))
    return {
        "way": way,
        "routes": routes,
        "stops_ms": [round(1000 * (continued - told), 1) for told, _, _, continued in stops],
        "answered": traffic.answered,
        "lost": traffic.lost,
        "until_ms": found.until,
        "lasts_ms": found.lasts,
    }


def _record(opened: OpenFleet, stops: list[Stop]) -> None:
    """Record each later stop."""
    pauses = opened.fleet._pauses
    add = pauses.add

    def recorded(url: str, version: int, told: float, stopped: float, loaded: float) -> None:
        stops.append((told, stopped, loaded, pauses.clock()))
        add(url, version, told, stopped, loaded)

    pauses.add = recorded  # type: ignore[method-assign]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The milliseconds until each step, with the step's own in brackets, one column a way."""
    lines = [f"{'':24}" + "".join(f"{result['way']:>20}" for result in results)]
    for step in MOMENTS:
        if any(step in result["until_ms"] for result in results):
            cells = []
            for result in results:
                until, lasts = result["until_ms"].get(step), result["lasts_ms"].get(step)
                cells.append(f"{until} ({lasts})" if lasts is not None else str(until))
            lines.append(f"{step:24}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


async def measure_shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server of this shape, and measure all ways."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = PushLoad(options.requests, options.prompt, options.shortest, options.longest, options.pushes, options.calm)
    results = []
    with tempfile.TemporaryDirectory() as name:
        model, times = Path(name) / "model", Path(name) / "times"
        make_model(shape, torch.bfloat16, device).save_pretrained(model)
        word_tokenizer(SHAPES[shape].vocabulary).save_pretrained(model)
        if device == "cuda":
            torch.cuda.empty_cache()
        policy = Policy(model)
        os.environ[timed_sglang.TIMES] = str(times)
        program = Path(name) / "sglang-python"
        program.write_text(
            f'#!/bin/sh\nshift 2\nexec {shlex.quote(options.python)} -P {shlex.quote(timed_sglang.__file__)} "$@"\n'
        )
        program.chmod(0o755)
        arguments = ["--custom-weight-loader", LOADER, *shlex.split(options.server)]
        async with launched(
            str(program), model, Path(name) / "log", memory=options.memory, arguments=arguments, tokenizer=True
        ) as url:
            for way in options.ways:
                results.append(await measure(url, policy, load, way, options.mode, times))
                print(f"{shape}, {policy.nbytes >> 20} MB, {len(policy.tensors)} tensors, {way}: {results[-1]}")
        log = (Path(name) / "log").read_text(errors="replace")
        loader = [line for line in log.splitlines() if "asyncrl loads" in line]
    print(*loader, table(results), sep="\n", flush=True)
    return {"megabytes": policy.nbytes >> 20, "tensors": len(policy.tensors), "loader": loader, "ways": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python that has SGLang")
    parser.add_argument("--server", default="", help="further arguments of the server")
    parser.add_argument("--memory", type=float, help="the server's share of the GPU's memory")
    parser.add_argument("--shapes", nargs="+", default=["135M", "0.6B"], help="sizes of benchmarks.shapes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--mode", default="in_place", help="weights.mode")
    parser.add_argument("--requests", type=int, default=256, help="requests at once")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--shortest", type=int, default=32, help="fewest tokens of an answer")
    parser.add_argument("--longest", type=int, default=224, help="most tokens of an answer")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--calm", type=float, default=1.5, help="seconds between pushes, at least")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result = {shape: asyncio.run(measure_shape(shape, options)) for shape in options.shapes}
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    print(write_result("push_stops", result, device))


if __name__ == "__main__":
    main()
