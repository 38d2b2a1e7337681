"""The servers and runs of benchmarks.gpu_loop."""

from __future__ import annotations

import argparse
import asyncio
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

from asyncrl.config.quoting import as_word
from asyncrl.config.schema import OldGroupsConfig
from asyncrl.data.writing import write_tasks
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.machine.child import ending_with_parent, last_lines
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from asyncrl.text import reason_of
from benchmarks.fleets import launched
from benchmarks.loop_bare import Load, bare_rate
from benchmarks.loop_figures import FIRST
from benchmarks.loop_result import COLOCATED, OLD_GROUPS, label
from benchmarks.loop_servers import Fitted, own_arguments, shared_memory
from benchmarks.loop_workload import AGENT, RULE, USER, USER_NAME, WORKLOAD, Workload
from benchmarks.shapes import SHAPES, end_turns, make_model, word_tokenizer

TASKS = 4096
POLL_S = 0.5
STOP_S = 60.0
PROBE_S = 60.0

_HAS_SGLANG = "import importlib.util; print('\\nsglang:', importlib.util.find_spec('sglang') is not None)"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run: `at_once` episodes; batches of `batch` trajectories in groups of `group`."""

    at_once: int
    batch: int
    group: int
    micro_tokens: int
    warm_s: float
    bare_s: float


SMALL = Scale(at_once=16, batch=8, group=4, micro_tokens=2048, warm_s=1.0, bare_s=4.0)
LARGE = {
    "heavy": Scale(at_once=256, batch=64, group=8, micro_tokens=32768, warm_s=15.0, bare_s=20.0),
    "short": Scale(at_once=512, batch=256, group=16, micro_tokens=32768, warm_s=15.0, bare_s=20.0),
}
"""The scales of the workloads on GPUs."""


EVICT = "evict"
OLD_GROUPS_OPTIONS = {
    EVICT: OldGroupsConfig(wait_s=0.0, mask=False),
    "default": OldGroupsConfig(),
    "short wait": OldGroupsConfig(mask=False),
    "wait": OldGroupsConfig(wait_s=600.0, mask=False),
    "mask": OldGroupsConfig(wait_s=0.0, mask=True),
    "both": OldGroupsConfig(wait_s=5.0, mask=True),
}
"""The options of each treatment of groups that become too old, in runs and in simulations."""


def words_of(options: OldGroupsConfig) -> list[str]:
    """The words of a command line that set the options."""
    given = {"wait_s": options.wait_s, "mask": options.mask}
    return [as_word(f"replay.old_groups.{name}", value) for name, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: at an age bound with a treatment of old groups, or synchronous with learner and servers in turns on the
    same GPUs."""

    max_lag: int
    colocated: bool = False
    old_groups: str = EVICT

    @property
    def row(self) -> dict[str, Any]:
        """The fields that name the case in a result."""
        treated = {} if self.old_groups == EVICT else {OLD_GROUPS: self.old_groups}
        return {"max_lag": self.max_lag, **({"colocated": True} if self.colocated else {}), **treated}

    @property
    def label(self) -> str:
        return label(self.row)

    @property
    def words(self) -> str:
        return COLOCATED if self.colocated else f"max_lag {self.label}"

    @property
    def name(self) -> str:
        """The name of the run."""
        return COLOCATED if self.colocated else f"lag-{self.label.replace(' ', '-')}"


class Loop:
    """A model and its tasks in a folder, an engine for the model, and one run of training for each case."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.scale = LARGE[options.workload] if options.gpus else SMALL
        if options.at_once:
            self.scale = replace(self.scale, at_once=options.at_once)
        self._workload_name: str = options.workload if options.gpus else f"{options.workload}-tiny"
        self.workload = Workload.named(self._workload_name)
        self.folder: Path = options.dir / f"{options.size}-{options.gpus}"
        self.urls: list[str] = []
        self.deadline = time.monotonic() + options.seconds
        self._options = options
        self._gpus = server_gpus(options.gpus, options.servers, options.per_gpu)
        self._dtype = "bfloat16" if options.gpus else "float32"
        self._end = -1

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def prepare(self) -> None:
        """Write model and tasks again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        device = "cuda" if self._options.gpus else "cpu"
        model = make_model(self._options.size, getattr(torch, self._dtype), device)
        tokenizer = word_tokenizer(SHAPES[self._options.size].vocabulary)
        self._end = tokenizer.eos_token_id
        if self.workload.mean_turn is not None:
            end_turns(model, self._end, self.workload.mean_turn)
        model.save_pretrained(self.model)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        tokenizer.save_pretrained(self.model)
        write_tasks(self.folder / "tasks.parquet", self.workload.tasks(TASKS))

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[None]:
        """Start servers, which end with this context. An embedded engine has none."""
        options = self._options
        if options.engine == "embedded":
            yield
            return
        # Each server is given what a run would give it.
        fitted = Fitted(options, self.model, self.workload.longest_episode, self.scale.at_once, len(self._gpus))
        async with AsyncExitStack() as stack:
            # All servers start at the same time.
            opening = [
                launched(options.python, self.model, self.folder / f"server-{index}.log", gpu, *fitted.on(gpu))
                for index, gpu in enumerate(self._gpus)
            ]
            self.urls = list(await asyncio.gather(*(stack.enter_async_context(each) for each in opening)))
            yield
        self.urls = []

    async def bare(self) -> float:
        """Tokens a second of a bare client over the servers or the embedded engine, after a short warm-up."""
        scale = self.scale
        load = Load(
            self._workload_name,
            SHAPES[self._options.size].vocabulary,
            stop=(self._end,) if self.workload.mean_turn is not None else (),
            at_once=scale.at_once,
            group=scale.group,
            warm_s=scale.warm_s,
            measured_s=scale.bare_s,
            model=str(self.model.absolute()),
            dtype=self._dtype,
        )
        return await bare_rate(load, self.urls)

    async def run(self, case: Case, seconds: float) -> Path:
        """Train in one case, for at most that many seconds after the first step; returns the run's folder. Raises
        AsyncrlError: the run ended too early for figures."""
        run_dir, log = self.folder / case.name, self.folder / f"{case.name}.log"
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [sys.executable, "-m", "asyncrl", "train", *self.settings(case), *self._options.set]
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

    def settings(self, case: Case) -> list[str]:
        """The settings of a run, as words of the command line."""
        scale, workload, folder = self.scale, self.workload, self.folder.absolute()
        longest = workload.longest_episode
        return [
            *(f"run.dir={folder}", f"run.name={case.name}", f"data.train={folder / 'tasks.parquet'}"),
            *(f"model.path={folder / 'model'}", f"model.dtype={self._dtype}"),
            *(f"actor.concurrency={scale.at_once}", f"actor.max_turns={workload.turns[1]}"),
            f"actor.max_turn_tokens={workload.longest_turn}",
            *(f"actor.max_tokens={longest}", f"actor.max_total_tokens={longest}"),
            *(f"scoring.rule={RULE}", f"replay.max_lag={case.max_lag}", f"learner.steps={FIRST + self._options.steps}"),
            *(f"learner.batch_size={scale.batch}", f"learner.group_size={scale.group}"),
            *(f"learner.micro_tokens={max(longest, scale.micro_tokens)}", "learner.export=false"),
            *("learner.checkpoint_every=1000000", "cluster.actors=1"),
            *("network.replay_port=0", "network.weights_port=0"),
            *words_of(OLD_GROUPS_OPTIONS[case.old_groups]),
            *self._player_settings(),
            *self._engine_settings(case),
        ]

    def _player_settings(self) -> list[str]:
        if self.workload.mean_turn is None:
            return [f"actor.agent={AGENT}"]
        user = {"class_name": USER, "config": {WORKLOAD: self._workload_name}}
        return ["actor.tools=[]", as_word("actor.interactions", {USER_NAME: user})]

    def _engine_settings(self, case: Case) -> list[str]:
        """The settings of the engine, and of the GPUs that the run may use."""
        options, kind = self._options, "sglang" if self._options.gpus else "sglang_cpu"
        if options.engine == "embedded":
            return ["engine=embedded", f"engine.slots={self.scale.at_once}", f"cluster.gpus={options.gpus}"]
        if case.colocated:
            own = [as_word("engine.server.arguments", own_arguments(options))] if options.server else []
            started = ["engine.launch=true", as_word("engine.python", options.python), *own]
            return [f"engine={kind}", *started, "cluster.colocated=true", f"cluster.gpus={options.gpus}"]
        memory = [f"learner.memory={shared_memory(self._gpus)['learner']}"] if 0 in self._gpus and options.gpus else []
        urls = f"engine.urls=[{','.join(self.urls)}]"
        return [f"engine={kind}", "engine.launch=false", urls, f"cluster.gpus={min(1, options.gpus)}", *memory]


def server_gpus(gpus: int, servers: int | None, per_gpu: int = 1) -> Sequence[int]:
    """The GPU of each server, if `servers` GPUs have `per_gpu` servers each. None: each GPU but the learner's has
    servers. Without GPUs servers run on the CPU with GPU number 0."""
    if not gpus:
        return [0] * (servers or 1)
    return [gpu for gpu in range(gpus)[-(servers or max(1, gpus - 1)) :] for _ in range(per_gpu)]


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
