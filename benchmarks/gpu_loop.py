"""How fast is the whole loop, servers, actors and learner, on one GPU that they share, or on a GPU each?

    python -m benchmarks.gpu_loop --python PYTHON --size 0.6B --gpus 2 --lags 0 1 2 4 8
    python -m benchmarks.gpu_loop --python PYTHON --size tiny --gpus 0 --lags 0 4 --steps 4

starts SGLang servers with the Python at PYTHON (one for each GPU but the learner's, or one that shares its GPU, or one
on the CPU), measures what they give to a bare client, and then trains a random model with `asyncrl train` at each age
bound. The servers stay for all of them. `loop_workload.yaml` has the distributions of the episodes. `max_lag = 0` is
synchronous training with the same code.

A result has all age bounds that were measured so far, in benchmarks/results/gpu_loop-NAME.json; it is written after
each. `--resume` measures only those that it lacks. `python -m benchmarks.loop_report FILE...` makes a table and a
picture of results. Ctrl-C and SIGTERM end everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.data.writing import write_tasks
from asyncrl.errors import AsyncrlError
from asyncrl.launch.placement.dealing import memory_shares
from asyncrl.machine.child import ending_with_parent, last_lines
from asyncrl.observe.lines import read_lines
from asyncrl.observe.sinks import metrics_file
from benchmarks.fleets import launched, server_version
from benchmarks.loop_bare import bare_rate
from benchmarks.loop_figures import FIRST, figures
from benchmarks.loop_report import stops
from benchmarks.loop_workload import AGENT, RULE, Workload
from benchmarks.record import RESULTS, machine, write_result
from benchmarks.shapes import SHAPES, make_model, word_tokenizer

ROOT = Path(__file__).parent.parent
SERVER_MEMORY = 0.75
"""Of a GPU that a server has to itself: `ipc` keeps versions there, too."""

TASKS = 4096
POLL_S = 0.5
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a run is: `at_once` episodes; batches of `batch` trajectories in groups of `group`."""

    workload: str
    at_once: int
    batch: int
    group: int
    micro_tokens: int
    warm_s: float
    bare_s: float


SMALL = Scale("tiny", at_once=16, batch=8, group=4, micro_tokens=2048, warm_s=1.0, bare_s=4.0)
LARGE = Scale("gpu", at_once=256, batch=64, group=8, micro_tokens=32768, warm_s=15.0, bare_s=20.0)


class Loop:
    """A model and its tasks in a folder, servers over it, and one run of training for each age bound."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.scale = SMALL if options.gpus == 0 else LARGE
        self.workload = Workload.named(options.workload or self.scale.workload)
        self.folder = Path(options.dir) / f"{options.size}-{options.gpus}"
        self.urls: list[str] = []
        self._options = options
        self._shares = memory_shares({"learner": (0,), "actor": (0,)}, {}) if options.gpus == 1 else {}

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def prepare(self) -> None:
        """Write model and tasks anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        device, dtype = ("cuda", torch.bfloat16) if self._options.gpus else ("cpu", torch.float32)
        model = make_model(self._options.size, dtype, device)
        model.save_pretrained(self.model)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        word_tokenizer(SHAPES[self._options.size].vocabulary).save_pretrained(self.model)
        write_tasks(self.folder / "tasks.parquet", self.workload.tasks(TASKS))

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[None]:
        """Servers, which end with this."""
        options, arguments = self._options, shlex.split(self._options.server)
        gpus = range(1, options.gpus) if options.gpus > 1 else [0]
        memory = (self._shares.get("actor") or SERVER_MEMORY) if options.gpus else None
        async with AsyncExitStack() as stack:
            # Each begins while the others do.
            opening = [
                launched(options.python, self.model, self.folder / f"server-{gpu}.log", gpu, memory, arguments)
                for gpu in gpus
            ]
            self.urls = list(await asyncio.gather(*(stack.enter_async_context(each) for each in opening)))
            yield

    async def bare(self) -> float:
        """Tokens a second that the servers give to a bare client, after a short time that warms them up."""
        vocabulary, scale = SHAPES[self._options.size].vocabulary, self.scale
        return await bare_rate(self.urls, self.workload, vocabulary, scale.at_once, scale.warm_s, scale.bare_s)

    async def lag(self, max_lag: int) -> Path:
        """Train at one age bound; returns the run's folder. Raises AsyncrlError: the run failed before its last step,
        and too early for figures."""
        run_dir = self.folder / f"lag-{max_lag}"
        shutil.rmtree(run_dir, ignore_errors=True)
        log = self.folder / f"lag-{max_lag}.log"
        command = [sys.executable, "-m", "asyncrl", "train", *self._settings(max_lag), *self._options.set]
        with log.open("wb") as output:
            # A run that outlives a killed benchmark would keep its share of the GPU.
            process = await asyncio.create_subprocess_exec(
                *ending_with_parent(command, signal.SIGTERM),
                stdout=output,
                stderr=output,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                await self._watch(process, run_dir)
            finally:
                await _end(process)
        if process.returncode and len(_steps(run_dir)) <= FIRST:
            raise AsyncrlError(f"the run at max_lag {max_lag} failed; the end of {log}:\n{last_lines(log)}")
        return run_dir

    async def _watch(self, process: asyncio.subprocess.Process, run_dir: Path) -> None:
        """Say each step, until the run ends, or its time after the first step is over."""
        first_at, seen = float("inf"), 0
        while process.returncode is None:
            for row in _steps(run_dir)[seen:]:
                seen += 1
                first_at = min(first_at, time.monotonic())
                seconds = {name: row.get(f"seconds/{name}", 0.0) for name in ("step", "wait", "train")}
                say(
                    f"  step {row['step']}: {seconds['step']:.2f} s, of these {seconds['wait']:.2f} waiting and "
                    f"{seconds['train']:.2f} training, {row['tokens_sampled']:.0f} sampled tokens"
                )
            if time.monotonic() - first_at > self._options.lag_seconds:
                say(f"  stopped after {self._options.lag_seconds:g} s")
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), POLL_S)

    def _settings(self, max_lag: int) -> list[str]:
        options, scale, workload, folder = self._options, self.scale, self.workload, self.folder.absolute()
        longest = workload.longest_episode
        memory = [f"learner.memory={self._shares['learner']}"] if self._shares else []
        return [
            *(f"run.dir={folder}", f"run.name=lag-{max_lag}", f"data.train={folder / 'tasks.parquet'}"),
            *(f"model.path={folder / 'model'}", f"model.dtype={'bfloat16' if options.gpus else 'float32'}"),
            *(f"engine={'sglang' if options.gpus else 'sglang_cpu'}", "engine.launch=false"),
            f"engine.urls=[{','.join(self.urls)}]",
            *(f"actor.agent={AGENT}", f"actor.concurrency={scale.at_once}", f"actor.max_turns={workload.turns[1]}"),
            f"actor.max_turn_tokens={int(workload.turn_tokens['longest'])}",
            *(f"actor.max_tokens={longest}", f"actor.max_total_tokens={longest}"),
            *(f"scoring.rule={RULE}", "scoring.shaping.environment_weight=1"),
            *(f"replay.max_lag={max_lag}", f"learner.steps={FIRST + options.steps}"),
            *(f"learner.batch_size={scale.batch}", f"learner.group_size={scale.group}"),
            *(f"learner.micro_tokens={max(longest, scale.micro_tokens)}", "learner.export=false"),
            *("learner.checkpoint_every=1000000", f"cluster.gpus={min(1, options.gpus)}", "cluster.actors=1"),
            *("network.replay_port=0", "network.weights_port=0", *memory),
        ]


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(metrics_file(run_dir, "learner")) if "seconds/step" in row]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop a run as a user does; one that has not ended after STOP_S is killed, and its roles end with it."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        say(f"  the run did not stop within {STOP_S:g} s, and was killed")
        process.kill()
        await process.wait()


def say(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def described(options: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """All that decides what is measured: figures of results that differ here cannot be compared."""
    return {
        "size": options.size,
        "gpus": options.gpus,
        "steps": options.steps,
        **asdict(loop.scale),
        "workload": json.loads(json.dumps(asdict(loop.workload))),
        "server_arguments": options.server,
        "settings": options.set,
    }


class Result:
    """What was measured so far, in a file that is written after each age bound. `resume` keeps what the file has, if
    that was measured with the same settings."""

    def __init__(self, options: argparse.Namespace, loop: Loop) -> None:
        self.name = f"gpu_loop-{options.name or f'{options.size}-{options.gpus}gpu'}"
        self.content: dict[str, Any] = {"settings": described(options, loop), "rows": []}
        self._folder = options.out
        self._device = f"{options.gpus} x {torch.cuda.get_device_name(0)}, {machine()}" if options.gpus else None
        file = options.out / f"{self.name}.json"
        if options.resume and file.exists():
            earlier = json.loads(file.read_text())["result"]
            if earlier["settings"] == self.content["settings"]:
                self.content = earlier
        self.content["failed"] = {}

    @property
    def lags(self) -> list[int]:
        return [row["max_lag"] for row in self.content["rows"]]

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"] = sorted([*self.content["rows"], row], key=lambda each: each["max_lag"])

    def write(self) -> None:
        say(f"written to {write_result(self.name, self.content, self._device, self._folder)}")


async def measure(options: argparse.Namespace) -> bool:
    """Measure and write; False if an age bound failed."""
    loop = Loop(options)
    result = Result(options, loop)
    wanted = [lag for lag in options.lags if lag not in result.lags]
    say(f"{result.name}: age bounds {wanted}, {FIRST + options.steps} steps each, in {loop.folder}")
    if not wanted:
        return True
    loop.prepare()
    async with loop.servers():
        version = result.content["sglang"] = await server_version(loop.urls[0])
        say(f"SGLang {version} answers at {', '.join(loop.urls)}")
        if "bare_tokens_per_s" not in result.content:
            result.content["bare_tokens_per_s"] = round(await loop.bare(), 1)
        bare = result.content["bare_tokens_per_s"]
        say(f"a bare client gets {bare:.0f} tokens/s")
        for max_lag in wanted:
            say(f"max_lag {max_lag}")
            try:
                row = figures(await loop.lag(max_lag), bare)
            except (AsyncrlError, ValueError) as error:
                say(str(error))
                result.content["failed"][max_lag] = str(error)
            else:
                result.add({"max_lag": max_lag, **row})
                say(
                    f"max_lag {max_lag}: {row['samples_per_s']:.2f} samples/s, learner idle {row['learner_idle']:.0%}, "
                    f"fleet idle {row['fleet_idle']:.0%}, {row['fleet_to_bare']:.0%} of the bare rate, "
                    f"stop of a push (median, p95, max) {stops(row['push']) or '-'} ms"
                )
            result.write()
    return not result.content["failed"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python that has sglang, or a script that starts it")
    parser.add_argument("--size", choices=list(SHAPES), default="0.6B" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="0: all on the CPU")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="age bounds, in this order")
    parser.add_argument("--steps", type=int, default=16, help=f"measured steps, after {FIRST} others")
    parser.add_argument(
        "--lag-seconds",
        type=float,
        default=float("inf"),
        help="after its first step; then a run counts",
    )
    parser.add_argument("--workload", help="name in loop_workload.yaml; otherwise gpu, or tiny on the CPU")
    parser.add_argument("--server", default="", help="more arguments of the servers: --server='--a 1 --b'")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the runs")
    parser.add_argument("--dir", default="runs/gpu_loop", help="where models, runs and logs go")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result goes")
    parser.add_argument("--name", help="of the result; otherwise SIZE-GPUSgpu")
    parser.add_argument("--resume", action="store_true", help="keep what the result of that name has")
    options = parser.parse_args(arguments)
    if options.gpus > torch.cuda.device_count():
        parser.error(f"--gpus {options.gpus}: this machine has {torch.cuda.device_count()}")
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
