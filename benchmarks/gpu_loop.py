"""Measures the whole loop of engine, actor and learner, on one shared GPU or on several.

    python -m benchmarks.gpu_loop --python PYTHON --size 0.6B --gpus 2 --workload short --lags 0 4 --colocated

It starts SGLang servers with the Python at PYTHON, and measures the token rate of a bare client. Then it trains a
random model with `asyncrl train` at each age bound over the same servers. The embedded engine needs no PYTHON:

    python -m benchmarks.gpu_loop --engine embedded --size tiny --gpus 0 --lags 0 4 --steps 4

`loop_workload.yaml` has the distributions of the episodes: `heavy` has heavy-tailed turns and waits, `short` the short
turns of tool calls. There are two baselines. `max_lag = 0` is synchronous training with the same code and GPUs.
`--colocated` adds the other one: synchronous training in which learner and servers have all GPUs in turns.

The learner has the first GPU, and servers have the last ones, by default all GPUs but the first. If all GPUs have
servers, the first ones share the learner's GPU. The embedded engine has the last GPU.

The result is written to runs/gpu_loop/gpu_loop-NAME.json after each run. `--resume` measures only the missing rows, on
the same device and with the same settings and SGLang. `python -m benchmarks.loop_report FILE...` makes a table and a
picture. Ctrl-C and SIGTERM end everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import WeightsConfig
from asyncrl.errors import AsyncrlError
from benchmarks.fleets import server_version
from benchmarks.loop_figures import FIRST, figures
from benchmarks.loop_report import compared, stops
from benchmarks.loop_result import Result
from benchmarks.loop_runs import EVICT, OLD_GROUPS_OPTIONS, Case, Loop, check_python, say, server_gpus
from benchmarks.record import machine
from benchmarks.shapes import SHAPES

LAGS = (0, 1, 2, 4, 8)
ENGINES, WORKLOADS = ("sglang", "embedded"), ("heavy", "short")
FOLDER = Path("runs/gpu_loop")
MODE = "weights.mode="


def described(options: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """All settings of the measurement. Results with different settings cannot be compared."""
    embedded = options.engine == "embedded"
    return {
        "size": options.size,
        "gpus": options.gpus,
        "engine": options.engine,
        "servers": 0 if embedded else len(server_gpus(options.gpus, options.servers, options.per_gpu)),
        "steps": options.steps,
        **asdict(loop.scale),
        "workload": json.loads(json.dumps(asdict(loop.workload))),
        "server_arguments": options.server,
        "settings": options.set,
    }


def named(options: argparse.Namespace) -> str:
    """The name of the result. It includes engine, workload, servers and weights mode if they are not the default, so
    that one result does not replace another."""
    servers, usual = (len(server_gpus(options.gpus, number)) for number in (options.servers, None))
    mode = ([WeightsConfig().mode] + [word.removeprefix(MODE) for word in options.set if word.startswith(MODE)])[-1]
    parts = [options.size, f"{options.gpus}gpu"]
    parts += [each for each in (options.engine, options.workload) if each not in (ENGINES[0], WORKLOADS[0])]
    parts += [f"{servers}servers"] if servers != usual else []
    parts += [f"{options.per_gpu}each"] if options.per_gpu > 1 else []
    parts += [mode] if mode != WeightsConfig().mode else []
    return f"gpu_loop-{options.name or '-'.join(parts)}"


def opened(options: argparse.Namespace, loop: Loop) -> Result:
    gpus = f"{options.gpus} x {torch.cuda.get_device_name(0)}, " if options.gpus else ""
    return Result(options.out, named(options), gpus + machine(), described(options, loop), options.resume)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The runs that were asked for, in order."""
    # In synchronous training no group becomes too old.
    treated = [Case(lag, old_groups=how) for lag in options.lags for how in (options.old_groups if lag else [EVICT])]
    return [*treated, *([Case(0, colocated=True)] if options.colocated else [])]


def cases(options: argparse.Namespace) -> dict[Case, float]:
    """The runs that were asked for, and the seconds that each may take. The colocated one comes last, since its run
    starts servers of its own."""
    every = cases_of(options)
    seconds = options.lag_seconds * (len(every) if len(options.lag_seconds) == 1 else 1)
    return dict(zip(every, seconds, strict=True))


async def measure(options: argparse.Namespace) -> bool:
    """Measure and write the result. False if a run failed."""
    if options.engine == "sglang":
        check_python(options.python)
    loop = Loop(options)
    result = opened(options, loop)
    wanted = {case: seconds for case, seconds in cases(options).items() if case.label not in result.labels}
    labels = ", ".join(case.label for case in wanted)
    say(f"{result.name}: rows {labels or 'none'}, {FIRST + options.steps} steps each, in {loop.folder}")
    over_servers = {case: seconds for case, seconds in wanted.items() if not case.colocated}
    lacks_bare = "bare_tokens_per_s" not in result.content
    if not wanted and not lacks_bare:
        return True
    loop.prepare()
    if over_servers or lacks_bare:
        async with loop.servers():
            await _measure_bare(loop, result)
            await _run_all(loop, result, over_servers)
    await _run_all(loop, result, {case: seconds for case, seconds in wanted.items() if case.colocated})
    return not result.content["failed"]


async def _measure_bare(loop: Loop, result: Result) -> None:
    """Record the engine, and the rate of a bare client if it is not yet known."""
    version = None
    if loop.urls:
        version = await server_version(loop.urls[0])
        say(f"SGLang {version} answers at {', '.join(loop.urls)}")
    result.served_by(version)
    if "bare_tokens_per_s" not in result.content:
        result.content["bare_tokens_per_s"] = round(await loop.bare(), 1)
    say(f"a bare client gets {result.content['bare_tokens_per_s']:.0f} tokens/s")
    result.write()


async def _run_all(loop: Loop, result: Result, wanted: Mapping[Case, float]) -> None:
    """Run each case, and write the result after each."""
    for case, seconds in wanted.items():
        if time.monotonic() > loop.deadline:
            say(f"no time left for {case.words}")
            continue
        say(case.words)
        try:
            row = figures(await loop.run(case, seconds), result.content["bare_tokens_per_s"])
        except (AsyncrlError, ValueError) as error:
            say(f"{case.words}: {error}")
            result.content["failed"][case.label] = str(error)
        else:
            result.add({**case.row, **row})
            say(
                f"{case.words}: {row['samples_per_s']:.2f} samples/s, learner idle {row['learner_idle']:.0%}, "
                f"fleet idle {row['fleet_idle']:.0%}, {row['fleet_to_bare']:.0%} of the bare rate, "
                f"stop of a push (median, p95, max) {stops(row['push']) or '-'} ms"
            )
        say(f"written to {result.write()}")
    for line in compared(result.content["rows"]) if wanted else ():
        say(line)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line()
    options = parser.parse_args(arguments)
    options.out = options.out or options.dir
    if problem := refusal(options, torch.cuda.device_count()):
        parser.error(problem)
    return options


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_system(parser)
    _add_runs(parser)
    _add_result(parser)
    return parser


def _add_system(parser: argparse.ArgumentParser) -> None:
    """Add the options for the engine, the model and the GPUs."""
    parser.add_argument("--python", help="a Python that has sglang, or a script that starts one")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="sglang: servers; embedded: one engine in the actor's process; default: %(default)s",
    )
    parser.add_argument(
        "--workload", choices=WORKLOADS, default=WORKLOADS[0], help="episodes to play; default: %(default)s"
    )
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
        "--servers",
        type=int,
        help="number of GPUs with servers; default: one fewer than GPUs; with as many, servers share the learner's GPU",
    )
    parser.add_argument("--per-gpu", type=int, default=1, help="servers on each of their GPUs; default: %(default)s")
    parser.add_argument(
        "--at-once", type=int, help="episodes at once; default: 256, for short turns 512, and 16 on the CPU"
    )
    parser.add_argument("--server", default="", help="more arguments of the servers: --server='--a 1 --b'")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the options for the runs that are measured, and for how long."""
    parser.add_argument(
        "--lags",
        type=int,
        nargs="*",
        default=list(LAGS),
        help="age bounds, in this order; none: only a bare client, and --colocated; "
        f"default: {' '.join(map(str, LAGS))}",
    )
    parser.add_argument(
        "--old-groups",
        choices=list(OLD_GROUPS_OPTIONS),
        nargs="+",
        default=["default"],
        help="treatments of groups that become too old, each at every age bound above 0; default: %(default)s",
    )
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="also train with max_lag 0 and cluster.colocated=true: learner and servers have all GPUs in turns",
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
        f"{FIRST + 1}: one number for all runs, or one for each, the colocated one last; default: no run is stopped",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds after the start of the benchmark at which the present run is stopped, as by --lag-seconds, and "
        "no further run begins; default: no limit",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the runs")


def _add_result(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folders and the name of the result."""
    parser.add_argument("--dir", type=Path, default=FOLDER, help="folder of models, runs, logs; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the result; default: the folder of --dir")
    parser.add_argument(
        "--name",
        help="name of the result; default: SIZE-GPUSgpu, and engine, workload, servers and weights.mode unless they "
        "are the default",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result of that name has")


def refusal(options: argparse.Namespace, gpus: int) -> str:
    """The reason why a machine with `gpus` GPUs cannot measure with these options. Empty: it can."""
    runs = len(cases_of(options))
    if not 0 <= options.gpus <= gpus:
        return f"--gpus {options.gpus}: this machine has {gpus}"
    if options.steps < 1 or (options.at_once is not None and options.at_once < 1):
        return "--steps and --at-once: at least 1"
    if len(options.lag_seconds) > 1 and len(options.lag_seconds) != runs:
        return f"--lag-seconds has {len(options.lag_seconds)} numbers for {runs} runs"
    if options.engine == "embedded":
        return _embedded_refusal(options)
    if options.python is None:
        return "--python: name a Python that has sglang, or use --engine embedded"
    if options.servers is not None and not 0 < options.servers <= (options.gpus or options.servers):
        return f"--servers {options.servers}: at least one, and at most one for each of the {options.gpus} GPUs"
    if options.per_gpu < 1 or (options.per_gpu > 1 and not options.gpus):
        return f"--per-gpu {options.per_gpu}: at least one server on each GPU, and on the CPU one"
    return ""


def _embedded_refusal(options: argparse.Namespace) -> str:
    if options.gpus > 2:
        return f"--gpus {options.gpus} with --engine embedded: one GPU for the learner and one for the engine, at most"
    if options.colocated:
        return (
            "--colocated with --engine embedded: it keeps its memory; on one GPU, --lags 0 already lets engine and "
            "learner have the GPU in turns"
        )
    given = {
        "--python": options.python,
        "--servers": options.servers,
        "--server": options.server,
        "--per-gpu": options.per_gpu > 1,
    }
    named_ones = [name for name, value in given.items() if value]
    return f"{', '.join(named_ones)}: an embedded engine has no servers" if named_ones else ""


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
