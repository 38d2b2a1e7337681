"""What do loading a model and saving checkpoints cost the learner?

A Qwen3 model with random weights in bfloat16 files, one rank, AdamW. Loading: seconds, and the peak of the process's
memory over what it had before, in shares of the rank's float32 weights. `--whole` loads it as every rank would do where
the files cannot be read shard by shard. Saving: how long training waits, and how long until the checkpoint is complete;
a learner that wrote its checkpoints itself would wait until then.

    python -m benchmarks.checkpoints --shape 120M
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.learner.checkpoint import Checkpoints, Progress
from asyncrl.learner.loading import StoredModel, open_model, read_model
from asyncrl.learner.optimizer import Trainable
from asyncrl.learner.policy import Policy, shard
from asyncrl.learner.ranks import Ranks, joined
from benchmarks.record import machine, write_result
from benchmarks.shapes import SHAPES, make_model

STEP_S = 10.0
"""Seconds between the first step of a run and its first save."""


@dataclass(frozen=True)
class Result:
    """Sizes in GB. Of the saves the first, and then each later one."""

    shape: str
    weights_gb: float
    load_s: float
    load_peak_gb: float
    state_gb: float
    stall_s: list[float]
    complete_s: list[float]


def memory_gb(name: str) -> float:
    """A figure of this process: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e9


def load(folder: Path, whole: bool, ranks: Ranks) -> Policy:
    config = ModelConfig(str(folder))
    stored = StoredModel(read_model(config)) if whole else open_model(config)
    policy = Policy(stored.model, 1.0)
    shard(policy, policy.model, config, ranks)
    stored.read(policy, ranks.device)
    return policy


def save(checkpoints: Checkpoints, trained: Trainable[Policy], step: int) -> tuple[float, float]:
    """Seconds until training may go on, and until the checkpoint is complete."""
    started = time.perf_counter()
    checkpoints.save(Progress(step=step), {"policy": trained})
    stall = time.perf_counter() - started
    checkpoints.wait()
    return stall, time.perf_counter() - started


def measure(shape: str, whole: bool, saves: int, folder: Path, ranks: Ranks) -> Result:
    model = folder / "model"
    made = make_model(shape, torch.bfloat16, ranks.device.type)
    made.save_pretrained(model)
    del made
    # The kernel counts the peak anew from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory_gb("VmRSS"), time.perf_counter()
    policy = load(model, whole, ranks)
    load_s, peak = time.perf_counter() - started, memory_gb("VmHWM") - before
    trained = Trainable(policy, 1e-6, LearnerConfig())
    trained.begin_moments(dict(policy.named_parameters()))
    checkpoints = Checkpoints(folder / "checkpoints", 2, ranks)
    # As after the first step of a run; the first save waits for what is left of it.
    checkpoints.prepare({"policy": trained})
    time.sleep(STEP_S)
    times = [save(checkpoints, trained, step + 1) for step in range(saves)]
    newest = checkpoints.complete()[-1]
    return Result(
        shape,
        sum(each.to_local().nbytes for each in policy.parameters() if isinstance(each, DTensor)) / 1e9,
        load_s,
        peak,
        sum(file.stat().st_size for file in newest.iterdir()) / 1e9,
        [stall for stall, _ in times],
        [complete for _, complete in times],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="120M")
    parser.add_argument("--whole", action="store_true", help="load with transformers, then shard")
    parser.add_argument("--saves", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, joined() as ranks:
        result = measure(options.shape, options.whole, options.saves, Path(folder), ranks)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else machine()
    print(result)
    print(write_result(f"checkpoints{'-whole' if options.whole else ''}", asdict(result), device))


if __name__ == "__main__":
    main()
