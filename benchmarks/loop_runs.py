"""The servers and runs of benchmarks.gpu_loop."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.data.writing import write_tasks
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.launch.placement.dealing import memory_shares
from asyncrl.machine.child import ending_with_parent, last_lines
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from asyncrl.text import reason_of
from benchmarks.fleets import launched
from benchmarks.loop_bare import bare_rate
from benchmarks.loop_figures import FIRST
from benchmarks.loop_workload import AGENT, RULE, Workload
from benchmarks.shapes import SHAPES, make_model, word_tokenizer

SERVER_MEMORY = 0.75
"""The server's share of a GPU of its own. The rest has room for versions of the weights (`ipc`)."""

TASKS = 4096
POLL_S = 0.5
STOP_S = 60.0
PROBE_S = 60.0

_HAS_SGLANG = "import importlib.util; print('\\nsglang:', importlib.util.find_spec('sglang') is not None)"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run: `at_once` episodes; batches of `batch` trajectories in groups of `group`."""

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
    """A model and its tasks in a folder, servers of the model, and one run of training for each age bound."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.scale = SMALL if options.gpus == 0 else LARGE
        if options.at_once:
            self.scale = replace(self.scale, at_once=options.at_once)
        self.workload = Workload.named(options.workload or self.scale.workload)
        self.folder: Path = options.dir / f"{options.size}-{options.gpus}"
        self.urls: list[str] = []
        self.deadline = time.monotonic() + options.seconds
        self._options = options
        self._gpus = server_gpus(options.gpus, options.servers)
        self._shares = memory_shares({"learner": (0,), "actor": self._gpus}, {}) if options.gpus else {}

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def prepare(self) -> None:
        """Write model and tasks again."""
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
        """Start servers, which end with this context."""
        options, arguments = self._options, shlex.split(self._options.server)
        async with AsyncExitStack() as stack:
            # All servers start at the same time.
            opening = [
                launched(options.python, self.model, self.folder / f"server-{index}.log", gpu, memory, arguments)
                for index, (gpu, memory) in enumerate(zip(self._gpus, self._memory(), strict=True))
            ]
            self.urls = list(await asyncio.gather(*(stack.enter_async_context(each) for each in opening)))
            yield

    def _memory(self) -> list[float | None]:
        """Each server's share of its GPU's memory."""
        if not self._options.gpus:
            return [None] * len(self._gpus)
        return [self._shares["actor"] if gpu == 0 else SERVER_MEMORY for gpu in self._gpus]

    async def bare(self) -> float:
        """Tokens a second of a bare client over the servers, after a short warm-up."""
        vocabulary, scale = SHAPES[self._options.size].vocabulary, self.scale
        return await bare_rate(self.urls, self.workload, vocabulary, scale.at_once, scale.warm_s, scale.bare_s)

    async def lag(self, max_lag: int, seconds: float) -> Path:
        """Train at one age bound, for at most that many seconds after the first step; returns the run's folder. Raises
        AsyncrlError: the run ended too early for figures."""
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
                stopped = await self._watch(process, run_dir, seconds)
            finally:
                await _end(process)
        if (steps := len(_steps(run_dir))) <= FIRST:
            if not stopped:
                say(f"the end of {log}:\n{last_lines(log)}")
            raise AsyncrlError(unmeasured(steps, log, stopped))
        return run_dir

    async def _watch(self, process: asyncio.subprocess.Process, run_dir: Path, seconds: float) -> bool:
        """Print each step until the run ends, or until the time of the run or of the benchmark is over. True: the time
        is over, so the caller must stop the run."""
        first_at, seen = float("inf"), 0
        while process.returncode is None:
            for row in _steps(run_dir)[seen:]:
                seen += 1
                first_at = min(first_at, time.monotonic())
                phases = {name: row.get(f"seconds/{name}", 0.0) for name in ("step", "wait", "train")}
                say(
                    f"  step {row['step']}: {phases['step']:.2f} s, of these {phases['wait']:.2f} waiting and "
                    f"{phases['train']:.2f} training, {row['tokens_sampled']:.0f} sampled tokens"
                )
            if time.monotonic() > min(first_at + seconds, self.deadline):
                say("  stopped: its time is over")
                return True
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), POLL_S)
        return False

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


def server_gpus(gpus: int, servers: int | None) -> Sequence[int]:
    """The GPU of each server. None: one server on each GPU but the learner's. Without GPUs servers run on the CPU with
    GPU number 0."""
    if not gpus:
        return [0] * (servers or 1)
    return range(gpus)[-(servers or max(1, gpus - 1)) :]


def unmeasured(steps: int, log: Path, stopped: bool) -> str:
    """The reason why a run with so few steps has no figures. It names no folder, since others read the result."""
    if stopped and not steps:
        return "ended before its first step"
    if stopped:
        return f"ended after {steps} of the {FIRST + 1} steps that figures need"
    return f"failed after {steps} of the {FIRST + 1} steps that figures need: {log.name} says why"


def check_python(python: str) -> None:
    """Check the program without the slow import of SGLang. Raises ConfigError: it cannot start servers."""
    mend = "name a Python that has sglang, or a script that starts one and passes its arguments on"
    try:
        done = subprocess.run(
            [python, "-c", _HAS_SGLANG],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--python={python}: {reason_of(error)}; {mend}") from error
    match done.stdout.split()[-2:]:
        case ["sglang:", "True"]:
            return
        case ["sglang:", "False"]:
            raise ConfigError(f"--python={python}: it has no sglang; {mend}")
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}")
    raise ConfigError(f"--python={python}: it is no Python, and ended with {said}; {mend}")


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(metrics_file(run_dir, "learner")) if "seconds/step" in row]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop a run as a user does. After STOP_S the run is killed, and its roles end with it."""
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
