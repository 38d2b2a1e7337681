"""Measures the whole loop of servers, actors and learner, on one shared GPU or on several.

    python -m benchmarks.gpu_loop --python PYTHON --size 0.6B --gpus 2 --lags 0 1 2 4 8
    python -m benchmarks.gpu_loop --python PYTHON --size 0.6B --gpus 2 --servers 2 --lags 0 4
    python -m benchmarks.gpu_loop --python PYTHON --size tiny --gpus 0 --lags 0 4 --steps 4

These commands start SGLang servers with the Python at PYTHON, and measure the token rate of a bare client. Then they
train a random model with `asyncrl train` at each age bound over the same servers. `loop_workload.yaml` has the
distributions of the episodes. `max_lag = 0` is synchronous training with the same code.

The learner has the first GPU, and servers have the last ones, by default all GPUs but the first. With as many servers
as GPUs the first server shares the learner's GPU.

The result is written to runs/gpu_loop/gpu_loop-NAME.json after each age bound. `--resume` measures only the missing age
bounds, on the same device and with the same settings and SGLang. `python -m benchmarks.loop_report FILE...` makes a
table and a picture. Ctrl-C and SIGTERM end everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import WeightsConfig
from asyncrl.errors import AsyncrlError
from benchmarks.fleets import server_version
from benchmarks.loop_figures import FIRST, figures
from benchmarks.loop_report import stops
from benchmarks.loop_result import Result
from benchmarks.loop_runs import Loop, check_python, say, server_gpus
from benchmarks.record import machine
from benchmarks.shapes import SHAPES

LAGS = (0, 1, 2, 4, 8)
FOLDER = Path("runs/gpu_loop")
MODE = "weights.mode="


def described(options: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """All settings of the measurement. Results with different settings cannot be compared."""
    return {
        "size": options.size,
        "gpus": options.gpus,
        "servers": len(server_gpus(options.gpus, options.servers)),
        "steps": options.steps,
        **asdict(loop.scale),
        "workload": json.loads(json.dumps(asdict(loop.workload))),
        "server_arguments": options.server,
        "settings": options.set,
    }


def named(options: argparse.Namespace) -> str:
    """The name of the result. It includes servers and weights mode if they are not the default, so that one result does
    not replace another."""
    servers, usual = (len(server_gpus(options.gpus, number)) for number in (options.servers, None))
    mode = ([WeightsConfig().mode] + [word.removeprefix(MODE) for word in options.set if word.startswith(MODE)])[-1]
    parts = [options.size, f"{options.gpus}gpu"]
    parts += [f"{servers}servers"] if servers != usual else []
    parts += [mode] if mode != WeightsConfig().mode else []
    return f"gpu_loop-{options.name or '-'.join(parts)}"


def opened(options: argparse.Namespace, loop: Loop) -> Result:
    gpus = f"{options.gpus} x {torch.cuda.get_device_name(0)}, " if options.gpus else ""
    return Result(options.out, named(options), gpus + machine(), described(options, loop), options.resume)


async def measure(options: argparse.Namespace) -> bool:
    """Measure and write the result. False if an age bound failed."""
    check_python(options.python)
    loop = Loop(options)
    result = opened(options, loop)
    wanted = [lag for lag in options.lags if lag not in result.lags]
    every = options.lag_seconds * (len(options.lags) if len(options.lag_seconds) == 1 else 1)
    seconds = dict(zip(options.lags, every, strict=True))
    say(f"{result.name}: age bounds {wanted}, {FIRST + options.steps} steps each, in {loop.folder}")
    if not wanted:
        return True
    loop.prepare()
    async with loop.servers():
        version = await server_version(loop.urls[0])
        say(f"SGLang {version} answers at {', '.join(loop.urls)}")
        result.served_by(version)
        if "bare_tokens_per_s" not in result.content:
            result.content["bare_tokens_per_s"] = round(await loop.bare(), 1)
        bare = result.content["bare_tokens_per_s"]
        say(f"a bare client gets {bare:.0f} tokens/s")
        for max_lag in wanted:
            if time.monotonic() > loop.deadline:
                say(f"no time left for max_lag {max_lag}")
                continue
            say(f"max_lag {max_lag}")
            try:
                row = figures(await loop.lag(max_lag, seconds[max_lag]), bare)
            except (AsyncrlError, ValueError) as error:
                say(f"max_lag {max_lag}: {error}")
                result.content["failed"][max_lag] = str(error)
            else:
                result.add({"max_lag": max_lag, **row})
                say(
                    f"max_lag {max_lag}: {row['samples_per_s']:.2f} samples/s, learner idle {row['learner_idle']:.0%}, "
                    f"fleet idle {row['fleet_idle']:.0%}, {row['fleet_to_bare']:.0%} of the bare rate, "
                    f"stop of a push (median, p95, max) {stops(row['push']) or '-'} ms"
                )
            say(f"written to {result.write()}")
    return not result.content["failed"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python that has sglang, or a script that starts one")
    parser.add_argument(
        "--size",
        choices=list(SHAPES),
        default="0.6B" if torch.cuda.is_available() else "tiny",
        help="size of the model; default: 0.6B, or tiny without a GPU",
    )
    parser.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="GPUs to use; 0: only the CPU; default: all"
    )
    parser.add_argument(
        "--servers", type=int, help="default: one fewer than GPUs; with as many, the first shares the learner's GPU"
    )
    parser.add_argument("--at-once", type=int, help="episodes at once; default: 256, or 16 on the CPU")
    parser.add_argument(
        "--lags",
        type=int,
        nargs="+",
        default=list(LAGS),
        help=f"age bounds, in this order; default: {' '.join(map(str, LAGS))}",
    )
    parser.add_argument(
        "--steps", type=int, default=16, help=f"measured steps, after {FIRST} others; default: %(default)s"
    )
    parser.add_argument(
        "--lag-seconds",
        type=float,
        nargs="+",
        default=[float("inf")],
        help="stop a run this number of seconds after its first step, and measure its steps if there are at least "
        f"{FIRST + 1}: one number for all age bounds, or one for each; default: no run is stopped",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds after the start of the benchmark at which the present run is stopped, as by --lag-seconds, and "
        "no further run begins; default: no limit",
    )
    parser.add_argument("--workload", help="name in loop_workload.yaml; default: gpu, or tiny on the CPU")
    parser.add_argument("--server", default="", help="more arguments of the servers: --server='--a 1 --b'")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the runs")
    parser.add_argument("--dir", type=Path, default=FOLDER, help="folder of models, runs, logs; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the result; default: the folder of --dir")
    parser.add_argument(
        "--name",
        help="name of the result; default: SIZE-GPUSgpu, and servers and weights.mode unless they are the default",
    )
    parser.add_argument("--resume", action="store_true", help="keep the age bounds that the result of that name has")
    options = parser.parse_args(arguments)
    options.out = options.out or options.dir
    if options.gpus > torch.cuda.device_count():
        parser.error(f"--gpus {options.gpus}: this machine has {torch.cuda.device_count()}")
    if len(options.lag_seconds) not in (1, len(options.lags)):
        parser.error(f"--lag-seconds has {len(options.lag_seconds)} numbers for {len(options.lags)} age bounds")
    if options.servers is not None and not 0 < options.servers <= (options.gpus or options.servers):
        parser.error(f"--servers {options.servers}: at least one, and at most one for each of the {options.gpus} GPUs")
    return options


async def _until_signal(options: argparse.Namespace) -> bool:
    """Measure; SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measure(options)


def main() -> None:
    try:
        sys.exit(0 if asyncio.run(_until_signal(parse())) else 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except AsyncrlError as error:
        say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
