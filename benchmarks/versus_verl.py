"""Compares training on tasks with a calculator with verl, on the same GPUs, one side after the other.

    python -m benchmarks.versus_verl --side verl-sync --python VERL_PYTHON --model runs/gsm8k_sft/model \
        --train gsm8k.parquet --held-out gsm8k_test.parquet --seconds 120

The model is that of `examples/gsm8k` after its first step. With `--rule exact_number` it may be that of
`examples/reasoning_gym`, with tasks of `asyncrl data reasoning-gym`. Both sides have the same tasks, tool, rule, batch,
lengths and learning rate, and `verl_settings` gives each its fastest settings. A call runs one side:

- `verl-sync`: verl's synchronous trainer. Servers and trainer have all GPUs in turns
- `verl-ahead`: verl's asynchronous trainer on the same GPUs in turns, one batch ahead
- `verl-async`: verl's fully asynchronous policy. Half of the GPUs train; --max-lag 1 is one step off
- `asyncrl-servers`, `asyncrl-embedded`: asyncrl with SGLang servers, and with the embedded engine

VERL_PYTHON is a Python that has verl 0.9.1 with SGLang, or a script that starts one. A call adds its side to
benchmarks/results/versus_verl.json.

`samples_per_s` counts the seconds of steps. verl evaluates between steps, and asyncrl during them. `accuracy` is over
all seconds since the first step began.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pynvml

from asyncrl.machine.child import kill_group, last_lines, start_guarded
from asyncrl.machine.gpu_use import VisibleGpus
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from benchmarks.record import RESULTS, machine, write_result
from benchmarks.verl_log import Console, Row
from benchmarks.verl_settings import (
    ENVIRONMENT,
    RULES,
    Work,
    asyncrl_settings,
    verl_module,
    verl_settings,
    words,
    write_parts,
    write_stand_in,
)

SIDES = ("verl-sync", "verl-ahead", "verl-async", "asyncrl-servers", "asyncrl-embedded")
RUNS = Path("runs/versus_verl")
ROOT = Path(__file__).resolve().parents[1]
SECONDS = "seconds/"
FIRST = 2
"""The number of first steps that no rate counts: kernels are compiled in them."""
POLL_S = 0.5
STOP_S = 30.0
PACKAGES = ("verl", "ray", "sglang", "torch", "transformers", "liger-kernel", "flash-attn", "asyncrl")
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Step(NamedTuple):
    """A trained step: the time of its end, and the seconds of the whole step and of its phases."""

    time: float
    seconds: float
    phases: Mapping[str, float]


class Evaluation(NamedTuple):
    time: float
    step: int
    accuracy: float


class Curve(NamedTuple):
    """The steps and evaluations of a run so far."""

    steps: Sequence[Step]
    evaluations: Sequence[Evaluation]


@dataclass
class Use:
    """The utilisation of each GPU at several times."""

    samples: list[tuple[float, list[float]]] = field(default_factory=list)

    def read(self, nvml: Any, gpus: Sequence[Any]) -> None:
        self.samples.append((time.time(), [nvml.nvmlDeviceGetUtilizationRates(each).gpu / 100 for each in gpus]))

    def mean(self, begin: float, end: float) -> list[float]:
        """The mean of each GPU between two times."""
        within = [shares for at, shares in self.samples if begin <= at <= end]
        return [round(fmean(shares), 3) for shares in zip(*within, strict=True)]


class VerlRun:
    """A run of verl in a folder. Its metrics are on its console."""

    def __init__(self, log: Path) -> None:
        self._console = Console(log, time.time)

    def curve(self) -> Curve:
        self._console.read()
        return curve_of(self._console.rows)


def curve_of(rows: Sequence[Row]) -> Curve:
    """The steps and evaluations in the rows of verl's console."""
    timed = [(row.time, row.seconds) for row in rows if row.seconds]
    steps = [Step(at, seconds["step"], _phases(seconds)) for at, seconds in timed]
    return Curve(steps, [Evaluation(row.time, row.step, row.accuracy) for row in rows if row.accuracy is not None])


class AsyncrlRun:
    """A run of asyncrl in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def curve(self) -> Curve:
        steps = [
            (row["time"], {key.removeprefix(SECONDS): value for key, value in row.items() if key.startswith(SECONDS)})
            for row in read_lines(metrics_file(self._folder, "learner"))
            if f"{SECONDS}step" in row
        ]
        evaluated = (row for row in read_lines(metrics_file(self._folder, "evaluation")) if "eval/accuracy" in row)
        return Curve(
            [Step(at, seconds["step"], _phases(seconds)) for at, seconds in steps],
            [Evaluation(row["time"], int(row["step"]), row["eval/accuracy"]) for row in evaluated],
        )


def _phases(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if name != "step"}


def figures(curve: Curve, use: Use, batch: int, launched: float) -> dict[str, Any]:
    """The figures of a run that was started at the time `launched`, without its first steps. Raises ValueError: it has
    not done FIRST + 1 steps."""
    steps, evaluations = curve
    if len(steps) <= FIRST:
        raise ValueError(f"the run has done {len(steps)} steps, and needs {FIRST + 1}: see its log")
    steady, begin, end = steps[FIRST:], steps[FIRST - 1].time, steps[-1].time
    count, start = len(steady) * batch, steps[0].time - steps[0].seconds
    phases = dict.fromkeys(name for step in steady for name in step.phases)
    return {
        "steps": len(steady),
        "samples_per_s": round(count / sum(step.seconds for step in steady), 2),
        "samples_per_s_with_evaluations": round(count / (end - begin), 2) if end > begin else None,
        "seconds_of_each_step": [round(step.seconds, 2) for step in steady],
        "seconds_of_a_step": round(fmean(step.seconds for step in steady), 3),
        "seconds_of_phases": {name: round(fmean(step.phases.get(name, 0.0) for step in steady), 3) for name in phases},
        "gpu_utilisation": use.mean(begin, end),
        "seconds_before_the_first_step": round(start - launched, 1),
        "accuracy": [
            {"seconds": round(max(0.0, each.time - start), 1), "step": each.step, "accuracy": round(each.accuracy, 4)}
            for each in evaluations
        ],
    }


def command_of(options: argparse.Namespace, work: Work, folder: Path) -> list[str]:
    """The command of a run. Writes the files that verl reads."""
    if options.side.startswith("verl"):
        write_parts(folder, work)
        start = [options.python, "-u", "-m", verl_module(options.side)]
        return [*start, *words(verl_settings(options.side, work, folder)), *options.set]
    settings = asyncrl_settings(options.side, work, folder, options.python)
    return [sys.executable, "-m", "asyncrl", "train", *words(settings), *options.set]


def work_of(options: argparse.Namespace) -> Work:
    names = ("gpus", "max_lag", "eval_every", "at_once", "micro_tokens", "lr", "rule")
    given = {name: getattr(options, name) for name in names}
    return Work(*(each.absolute() for each in (options.model, options.train, options.held_out)), **given)


def label_of(side: str, max_lag: int) -> str:
    """The name of a side in the result. The synchronous one has no age bound."""
    return side if side == "verl-sync" else f"{side}-lag{max_lag}"


def environment_of(side: str, folder: Path, has_attention: bool) -> dict[str, str]:
    """The environment of a run. A Python of verl without flash-attn gets a stand-in."""
    paths, more = [str(ROOT)], {}
    if side.startswith("verl"):
        more = dict(ENVIRONMENT)
        if not has_attention:
            write_stand_in(folder / "stand_in")
            paths.append(str(folder / "stand_in"))
    return {**more, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def played(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    run: VerlRun | AsyncrlRun,
    options: argparse.Namespace,
    look: Callable[[], None],
) -> Curve:
    """Run a command until the time of the run is over or it ends, and return its steps. `look` is called each
    second. Raises SystemExit: it ended, or `options.start_seconds` were over, before its first step.
    """
    end = time.monotonic() + options.start_seconds
    process = start_guarded(command, log, environment)
    begun = False
    try:
        while process.poll() is None and time.monotonic() < end:
            look()
            # The console of verl has no times, so it is read all the time.
            if run.curve().steps and not begun:
                begun, end = True, time.monotonic() + options.seconds
            time.sleep(POLL_S)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:
        kill_group(process)
    if not begun:
        raise SystemExit(
            f"no step was trained within {options.start_seconds:g} s; the end of {log}:\n{last_lines(log)}"
        )
    return run.curve()


def versions(python: str) -> dict[str, str]:
    """The versions of the packages that a Python has."""
    done = subprocess.run([python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def written(path: Path, label: str, row: Mapping[str, Any], device: str) -> Path:
    """Add a side to the result, and return the file."""
    sides = json.loads(path.read_text())["result"] if path.exists() else {}
    return write_result(path.stem, {**sides, label: row}, device, path.parent)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, required=True, help="what to run")
    parser.add_argument(
        "--python", default=sys.executable, help="Python that has verl, or SGLang for asyncrl's servers"
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the policy after `asyncrl sft`")
    parser.add_argument("--train", type=Path, required=True, help="tasks of `asyncrl data`")
    parser.add_argument("--held-out", type=Path, required=True, help="held-out tasks of `asyncrl data`")
    parser.add_argument("--rule", choices=RULES, default=Work.rule, help="rule of the outcome; default: %(default)s")
    parser.add_argument("--gpus", type=int, default=Work.gpus, help="GPUs to use; default: %(default)s")
    parser.add_argument("--max-lag", type=int, default=Work.max_lag, help="age bound in versions; default: %(default)s")
    parser.add_argument("--at-once", type=int, default=Work.at_once, help="episodes at once; default: %(default)s")
    parser.add_argument(
        "--micro-tokens", type=int, default=Work.micro_tokens, help="tokens of a learner's pass; default: %(default)s"
    )
    parser.add_argument("--lr", type=float, default=Work.lr, help="learning rate; default: %(default)s")
    parser.add_argument(
        "--eval-every", type=int, default=Work.eval_every, help="steps between two evaluations; default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=120, help="time after the first step; default: %(default)s")
    parser.add_argument(
        "--start-seconds", type=float, default=420, help="time for the first step; default: %(default)s"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of this side")
    parser.add_argument("--name", help="name of the row in the result; default: the side, and its age bound")
    parser.add_argument("--dir", type=Path, default=RUNS, help="folder of runs and logs; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result; default: %(default)s")
    parser.add_argument("--show", action="store_true", help="only print the command")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line().parse_args(arguments)
    work = work_of(options)
    label = options.name or label_of(options.side, work.max_lag)
    folder = (options.dir / label).absolute()
    log = folder.with_suffix(".log")
    if not options.show:
        # asyncrl would resume a run that is there.
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
    command = command_of(options, work, folder)
    if options.show:
        print(shlex.join(command))
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = VerlRun(log) if options.side.startswith("verl") else AsyncrlRun(folder)
    gpus = VisibleGpus(pynvml).handles[: work.gpus]
    if len(gpus) < work.gpus:
        raise SystemExit(f"--gpus={work.gpus}: this process may use {len(gpus)} GPUs (CUDA_VISIBLE_DEVICES)")
    packages = versions(options.python)
    environment = environment_of(options.side, folder, "flash-attn" in packages)
    use, launched = Use(), time.time()
    curve = played(command, log, environment, run, options, lambda: use.read(pynvml, gpus))
    row = {**figures(curve, use, work.batch, launched), "versions": packages, "command": command}
    print(f"{label}: {row['samples_per_s']} samples/s, {row['seconds_of_a_step']} s a step, accuracy {row['accuracy']}")
    device = f"{work.gpus} x {pynvml.nvmlDeviceGetName(gpus[0])}, {machine()}"
    print(f"written to {written(options.out / 'versus_verl.json', label, row, device)}")


if __name__ == "__main__":
    main()
