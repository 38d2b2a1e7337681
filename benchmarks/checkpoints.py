"""Measures the cost of loading a model and of saving checkpoints in the learner.

The model is a Qwen3 with random weights, and the optimizer is AdamW.

Loading is from bfloat16 files. `load_s` is its time, and `load_peak_gb` the growth of the process's peak memory.
`--whole` loads the model as a rank does if it cannot read the files shard by shard. `--made` skips loading.

Three times of each save are measured: how long training waits, when the next update can begin, and when the checkpoint
is complete. A learner without a writing thread would wait until it is complete. Times are of rank 0, and the sizes of
weights and state are of all ranks.

    python -m benchmarks.checkpoints --shape 120M

Each figure is printed as soon as it is known. A checkpoint that is not complete after `--limit` seconds is abandoned.
The previous checkpoint is removed before the next one begins, so the folder needs room for one.

    python -m benchmarks.checkpoints --shape 4B --made --ranks 2 --saves 2 --limit 90
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.model.loading import StoredModel, open_model, read_model
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.sharding import shard
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Membership, run_ranks
from asyncrl.learner.ranks.ranks import Ranks
from benchmarks.record import machine, write_result
from benchmarks.shapes import SHAPES, make_model

STEP_S = 10.0
"""Seconds between the first step of a run and its first save."""
POLL_S = 0.1


@dataclass
class Result:
    """The measurements. Sizes are in GB. Lists have one entry for each save; None: it was not complete in time."""

    shape: str
    ranks: int
    weights_gb: float = 0.0
    state_gb: float = 0.0
    load_s: float | None = None
    load_peak_gb: float | None = None
    stall_s: list[float] = field(default_factory=list)
    copied_s: list[float] = field(default_factory=list)
    complete_s: list[float | None] = field(default_factory=list)


def memory_gb(name: str) -> float:
    """The resident memory of this process in GB: VmRSS now, or VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e9


def load(folder: Path, whole: bool, ranks: Ranks) -> Policy:
    config = ModelConfig(str(folder))
    stored = StoredModel(read_model(config)) if whole else open_model(config)
    policy = Policy(stored.model, 1.0)
    shard(policy, policy.model, config, ranks)
    stored.read(policy, ranks.device)
    return policy


def loaded(options: argparse.Namespace, folder: Path, ranks: Ranks, result: Result) -> Policy:
    """Load the model from files that rank 0 writes first, and measure the cost."""
    model = folder / "model"
    if ranks.rank == 0:
        make_model(options.shape, torch.bfloat16, ranks.device.type).save_pretrained(model)
    ranks.barrier()
    # Resets the peak that the kernel counts.
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory_gb("VmRSS"), time.perf_counter()
    policy = load(model, options.whole, ranks)
    result.load_s, result.load_peak_gb = time.perf_counter() - started, memory_gb("VmHWM") - before
    return policy


def made(options: argparse.Namespace, ranks: Ranks) -> Policy:
    model = make_model(options.shape, torch.float32, ranks.device.type)
    policy = Policy(model, 1.0)
    shard(policy, policy.model, ModelConfig("random"), ranks)
    return policy


def save(checkpoints: Checkpoints, trained: Trainable[Policy], step: int, result: Result, ranks: Ranks) -> float:
    """Begin a checkpoint, and measure until training may continue. Returns the time of the beginning."""
    ranks.barrier()
    started = time.perf_counter()
    checkpoints.save(Progress(step=step), {"policy": trained})
    result.stall_s.append(time.perf_counter() - started)
    if trained.copied is not None:
        trained.copied.synchronize()
    result.copied_s.append(time.perf_counter() - started)
    tell(ranks, f"save {step}: training waits {result.stall_s[-1]:.3f} s, an update {result.copied_s[-1]:.3f} s")
    return started


def is_complete(checkpoints: Checkpoints, ranks: Ranks, deadline: float) -> bool:
    """Wait for the checkpoint until the deadline. True if it is complete on all ranks."""
    while not ranks.agree(checkpoints.completed()):
        if ranks.any(time.perf_counter() > deadline):
            return False
        time.sleep(POLL_S)
    return True


def measure(options: argparse.Namespace, folder: Path, ranks: Ranks) -> Result:
    """Measure on rank 0; figures that take longer than the limit are missing."""
    deadline = time.perf_counter() + options.limit
    result = Result(options.shape, ranks.size)
    policy = made(options, ranks) if options.made else loaded(options, folder, ranks, result)
    trained = Trainable(policy, 1e-6, LearnerConfig())
    trained.begin_moments(dict(policy.named_parameters()))
    weights = [each for each in policy.parameters() if isinstance(each, DTensor)]
    moments = [each for state in trained.moments().values() for each in state.values() if each.dim()]
    result.weights_gb, both = sum(each.nbytes for each in weights) / 1e9, [*weights, *moments]
    result.state_gb = sum(each.nbytes for each in both) / 1e9
    tell(
        ranks, f"{result.state_gb:.1f} GB of state, {result.weights_gb:.1f} GB of it weights; loading {result.load_s} s"
    )
    checkpoints = Checkpoints(folder / "checkpoints", 1, ranks)
    # A run prepares saving after its first step. If the preparation takes longer than STEP_S, the first save waits.
    checkpoints.prepare({"policy": trained})
    time.sleep(STEP_S)
    for step in range(1, options.saves + 1):
        started = save(checkpoints, trained, step, result, ranks)
        if not is_complete(checkpoints, ranks, deadline):
            written = sum(file.stat().st_size for file in folder.rglob("rank-*")) / 1e9
            tell(ranks, f"save {step} is not complete after {options.limit:.0f} s; {written:.1f} GB are in its files")
            result.complete_s.append(None)
            break
        result.complete_s.append(time.perf_counter() - started)
        tell(ranks, f"save {step} is complete after {result.complete_s[-1]:.1f} s")
        if ranks.rank == 0 and step < options.saves:
            shutil.rmtree(checkpoints.complete()[-1])
    return result


def tell(ranks: Ranks, what: str) -> None:
    if ranks.rank == 0:
        print(what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="120M")
    parser.add_argument("--whole", action="store_true", help="load with transformers, then shard")
    parser.add_argument("--made", action="store_true", help="make the model on the device, without files")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a checkpoint is abandoned")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints (default: a temporary folder)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if Membership.of_this_process() is not None:
        run(options, options.folder)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        if options.ranks == 1:
            run(options, Path(folder))
        else:
            command = [sys.executable, "-m", "benchmarks.checkpoints", *sys.argv[1:], "--folder", folder]
            run_ranks(command, options.ranks, threading.Event())


def run(options: argparse.Namespace, folder: Path) -> None:
    """Measure as one of the ranks. Rank 0 writes the result."""
    with joined() as ranks:
        result = measure(options, folder, ranks)
    if ranks.rank != 0:
        return
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else machine()
    print(result)
    print(write_result(f"checkpoints{'-whole' if options.whole else ''}", asdict(result), device))


if __name__ == "__main__":
    main()
