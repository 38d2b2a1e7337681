"""Measures how fast the learner trains, and compares that with the GPU's peak.

It trains Qwen3 shapes with random weights, dense ones and mixtures of experts, on batches of given lengths, with one
update a step. The policy sampled all tokens of a sequence but the first. Times are medians of `--runs` steps after two
warm-up steps, with an idle device before and after each phase. Peak memory is the allocator's.

With `--ranks 2` a step has twice the sequences, unless the ranks divide the tokens of each pass (`--context-ranks 2`)
or the layers (`--tensor-ranks 2`). Rates and MFU are of one rank.

MFU is the share of the GPU's peak that training uses. It counts three forward passes: 2 FLOPs a token for each weight
of the layers' matrices and of the head, and causal attention without its masked half. Of a layer's experts only the
active ones count. Recomputation and the proximal pass do not count.

The peak is the rate of a large bf16 product in the same run. If a shape has fewer layers than the real model, its head
has a larger share of the work.

`--ablate` repeats each case with one change of `ABLATIONS` at a time; `--set` changes options for all. `--replicas 2`
trains two copies of the model, and `--unit-bytes 0` gathers each layer separately. `--profile DIR` records one more
step of each case: the time of rank 0's GPU in kernels, in NCCL's kernels only, and in none.

    python -m benchmarks.learner --shapes 0.6B 4B --cases 8x2048 1x16384 heavy --ablate

The cases `lengths` have the same number of tokens a step, in sequences of 2k to 128k. Longer passes leave less room for
activations, and the column `kept` shows the share of them that the layers keep:

    python -m benchmarks.learner --cases lengths --runs 2 --name=-lengths
    python -m benchmarks.learner --cases lengths 1x262144 --runs 2 --ranks 2 --context-ranks 2 --name=-lengths-2
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.config.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from asyncrl.launch.placement.placement import MOST_THREADS
from asyncrl.learner.batch.entropy_sample import entropy_share
from asyncrl.learner.batch.local_batch import LocalBatch, build_episodes, build_local_batch
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.schedule import schedule
from asyncrl.learner.memory import fit_memory, usable_bytes
from asyncrl.learner.model.optimizer import Exchange, Trainable, UpdateResult
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.sharding import compiles, shard
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Membership, run_ranks
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.machine.process import limit_threads
from asyncrl.modelling.flops import ForwardFlops, measured_peak
from asyncrl.modelling.packed_attention import PACKED
from asyncrl.types import BatchPlan, Finish, Labels, Role, Trajectory, Turn, runs_of
from benchmarks.learner_profile import Profile, profiled
from benchmarks.record import machine, write_result
from benchmarks.shapes import SHAPES, make_model

MICRO_TOKENS = 16384
STEP_TOKENS = 131_072
LENGTHS = [f"{STEP_TOKENS >> power}x{1 << power}" for power in range(11, 18)]
"""The cases of `lengths`."""
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "model.activations=0": {"model.activations": 0.0},
    "model.compile=false": {"model.compile": False},
    "algorithm.proximal=recompute": {"algorithm.proximal": "recompute"},
}
"""The changed options of each ablation, by its name in the table."""


@dataclass(frozen=True)
class Row:
    """One case under one configuration. Seconds are medians. `tokens_per_s` and `mfu` leave out the proximal phase."""

    shape: str
    case: str
    changed: str
    passes: int
    tokens: int
    seconds: Mapping[str, float]
    tokens_per_s: float
    mfu: float
    mfu_with_proximal: float
    peak_gb: float
    first_step_s: float
    kept: float
    """The share of activations that layers keep instead of computing them again."""
    exchange: Exchange
    """The choice of when ranks exchange weights and gradients."""
    profile: Profile | None


class Stopwatch:
    """Seconds by phase, measured with an idle device at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        started = self._now()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - started
        return result

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Timed(Trainable[Policy]):
    """An optimizer that reports the time of its updates to a stopwatch."""

    watch: Stopwatch

    def update(self, step: int, scale: float = 1.0) -> UpdateResult:
        update: UpdateResult = self.watch("update", lambda: super(Timed, self).update(step, scale))
        return update


def lengths_of(case: str, step: int = 0) -> list[int]:
    """The lengths of a case. `8x2048`: eight of 2,048 tokens. `heavy`: 131,072 tokens in log-normal lengths of at most
    16,384, drawn again in every step."""
    if case != "heavy":
        count, length = case.split("x")
        return [int(length)] * int(count)
    drawn = np.random.default_rng(step).lognormal(7.0, 1.1, 1000).clip(64, MICRO_TOKENS).astype(int)
    chosen = drawn[drawn.cumsum() < STEP_TOKENS].tolist()
    return [*chosen, STEP_TOKENS - sum(chosen)]


def largest_pass(case: str, ranks: Ranks) -> int:
    """The tokens of the largest pass of the case."""
    return max(MICRO_TOKENS * ranks.context_size, *lengths_of(case))


def make_batch(
    lengths: Sequence[int], own: Sequence[int], vocabulary: int, device: torch.device
) -> tuple[BatchPlan, Episodes, LocalBatch]:
    """Make one trajectory of random tokens for each length, in groups of two if their number is even. The local batch
    has the trajectories with the ascending indices `own`."""
    rng = np.random.default_rng(1)
    group = 2 - len(lengths) % 2
    made = [_trajectory(f"{index}", index // group, length, vocabulary, rng) for index, length in enumerate(lengths)]
    plan = BatchPlan(
        step=0,
        version=1,
        ids=[each.id for each in made],
        group_ids=[each.group_id for each in made],
        tokens=lengths,
        sampled=[length - 1 for length in lengths],
        weights=[1.0] * len(lengths),
    )
    labels = [Labels(each.id, reward=float(rng.random()), outcome=0.0, scorer="random") for each in made]
    batch = build_local_batch(own, [made[index] for index in own], device)
    return plan, build_episodes(plan, labels, device), replace(batch, entropy_share=entropy_share(sum(plan.sampled)))


def _trajectory(name: str, group: int, length: int, vocabulary: int, rng: np.random.Generator) -> Trajectory:
    sampled = np.arange(length) > 0
    return Trajectory(
        id=name,
        task_id="task",
        group_id=str(group),
        member=0,
        tokens=rng.integers(0, vocabulary, length, dtype=np.int32),
        logprobs=np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
        version_runs=runs_of(np.where(sampled, 0, -1).astype(np.int32)),
        turns=(Turn(0, 1, Role.PROMPT), Turn(1, length, Role.ASSISTANT, "stop")),
        steps=(),
        finish=Finish.COMPLETED,
    )


def make_trainer(
    shape: str,
    options: Mapping[str, Any],
    ranks: Ranks,
    largest: int,
    usable: float | None,
    unit_bytes: float | None = None,
) -> tuple[Trainer, float]:
    """Make a trainer of a policy with random weights. `options` are keys of the configuration. The `largest` pass and
    the `usable` bytes of memory decide when ranks exchange weights, and the share of kept activations, which is
    returned second. `unit_bytes` is as for `shard`."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "algorithm": {}, "learner": {}}
    for name, value in options.items():
        section, key = name.split(".")
        sections[section][key] = value
    dtype = "bfloat16" if ranks.device.type == "cuda" else "float32"
    config = ModelConfig(path="random", **{"dtype": dtype, **sections["model"]})
    model = make_model(shape, torch.float32, ranks.device.type).eval()
    model.set_attn_implementation(PACKED)
    policy = Policy(model, 1.0, compiles(config, ranks.device, model))
    policy.activations = shard(policy, policy.model, config, ranks, unit_bytes=unit_bytes)
    learner = LearnerConfig(**sections["learner"])
    algorithm = Algorithm.from_config(AlgorithmConfig(**sections["algorithm"]))
    trained = Timed(policy, learner.lr, learner, config.dtype)
    trainer = Trainer(ranks, algorithm, trained, None, None, threading.Event())
    share = 1.0 if config.activations is None else config.activations
    if ranks.device.type == "cuda":
        share = fit_memory(trainer, [largest], usable or usable_bytes(ranks.device, learner.memory), config.activations)
    return trainer, share


@dataclass(frozen=True)
class Step:
    """The inputs of a step."""

    episodes: Episodes
    batch: LocalBatch
    minibatches: list[Minibatch]

    @staticmethod
    def of(trainer: Trainer, case: str, step: int) -> Step:
        ranks, policy = trainer.ranks, trainer.policy.module
        groups = ranks.pass_groups
        lengths = [length for group in range(groups) for length in lengths_of(case, step * groups + group)]
        costs = ForwardFlops.of(policy, policy.model.config)(lengths).tolist()
        (minibatch,) = schedule(lengths, costs, groups, 1, largest_pass(case, ranks))
        passes = minibatch[ranks.pass_group]
        own = sorted(member for members in passes for member in members)
        plan, episodes, batch = make_batch(lengths, own, policy.vocabulary, ranks.device)
        return Step(episodes, batch, [Minibatch(passes, Totals(sum(plan.sampled), len(lengths)))])


def measure(trainer: Trainer, case: str, runs: int) -> tuple[dict[str, float], int, float, float]:
    """Median seconds by phase, passes, peak memory in GB, and the seconds of the first step, which compiles."""
    ranks, policy = trainer.ranks, trainer.policy
    assert isinstance(policy, Timed)
    steps = []
    for number in range(runs + 2):
        step = Step.of(trainer, case, number)
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        watch = policy.watch = Stopwatch(ranks.device)
        prepared = watch("proximal", partial(trainer.prepare, step.batch, step.episodes, step.minibatches))
        watch("train", partial(trainer.learn, 0, prepared, step.episodes, step.minibatches))
        watch.seconds["forward_backward"] = watch.seconds.pop("train") - watch.seconds["update"]
        steps.append(watch.seconds)
    medians = {name: statistics.median(step[name] for step in steps[2:]) for name in steps[0]}
    peak = torch.cuda.max_memory_allocated() / 1e9 if ranks.device.type == "cuda" else 0.0
    return medians, len(step.minibatches[0].passes), peak, sum(steps[0].values())


def rows(options: argparse.Namespace, ranks: Ranks, peak: float) -> Iterator[Row]:
    """Measure each shape and case without changes, then under each ablation."""
    changes = {"": {}, **(ABLATIONS if options.ablate else {})}
    for shape in options.shapes:
        for changed, change in changes.items():
            for largest, cases in groupby(options.cases, key=lambda case: largest_pass(case, ranks)):
                every = {**options.set, **change}
                trainer, kept = make_trainer(shape, every, ranks, largest, options.usable, options.unit_bytes)
                for case in cases:
                    yield _row(trainer, shape, case, changed, options, peak, kept)
                del trainer
                gc.collect()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()


def _row(
    trainer: Trainer, shape: str, case: str, changed: str, options: argparse.Namespace, peak: float, kept: float
) -> Row:
    policy, lengths, together = trainer.policy.module, lengths_of(case), trainer.ranks.context_size
    seconds, passes, memory, first = measure(trainer, case, options.runs)
    profile = None
    if options.profile:
        step = Step.of(trainer, case, options.runs + 2)
        prepared = trainer.prepare(step.batch, step.episodes, step.minibatches)
        learn = partial(trainer.learn, 0, prepared, step.episodes, step.minibatches)
        profile = profiled(learn, options.profile / f"{shape}-{case}{changed}{options.name}", trainer.ranks)
    training = seconds["forward_backward"] + seconds["update"]
    useful = 3 * float(ForwardFlops.of(policy, policy.model.config)(lengths).sum()) / together
    mfu = useful / training / peak
    return Row(
        shape,
        case,
        changed,
        passes,
        sum(lengths),
        seconds,
        sum(lengths) / together / training,
        mfu,
        mfu * training / (training + seconds["proximal"]),
        memory,
        first,
        kept,
        trainer.policy.exchange,
        profile,
    )


def _setting(text: str) -> tuple[str, Any]:
    name, value = text.split("=", 1)
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    try:
        return name, words[value] if value in words else float(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6B"], choices=list(SHAPES))
    parser.add_argument(
        "--cases", nargs="+", default=["8x2048", "1x16384", "heavy"], help="COUNTxLENGTH, heavy, or lengths"
    )
    parser.add_argument("--runs", type=int, default=5, help="measured steps")
    parser.add_argument("--ranks", type=int, default=1, help="ranks, each with its own GPU")
    parser.add_argument("--context-ranks", type=int, default=1, help="ranks that divide the tokens of each pass")
    parser.add_argument("--tensor-ranks", type=int, default=1, help="ranks that divide the matrices of each layer")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model")
    parser.add_argument("--unit-bytes", type=float, help="least bytes of layers that ranks gather at once")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace one more step of each case into this folder")
    parser.add_argument("--set", nargs="+", default=[], type=_setting, metavar="OPTION=VALUE")
    parser.add_argument("--usable", type=float, help="bytes of memory for activations")
    parser.add_argument("--ablate", action="store_true", help="also measure each of the ablations")
    parser.add_argument("--name", default="", help="suffix of the result's file name")
    options = parser.parse_args()
    options.set = dict(options.set)
    options.cases = [each for case in options.cases for each in (LENGTHS if case == "lengths" else [case])]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # As many threads as the placement gives a learner. With threads for all cores, two ranks wait for each other's
    # cores in every small operation on the host.
    limit_threads(min(MOST_THREADS, max(1, (os.cpu_count() or 1) // options.ranks)))
    if options.ranks > 1 and Membership.of_this_process() is None:
        command = [sys.executable, "-m", "benchmarks.learner", *sys.argv[1:]]
        run_ranks(command, options.ranks, threading.Event())
        return
    with joined(options.replicas, context_ranks=options.context_ranks, tensor_ranks=options.tensor_ranks) as ranks:
        peak = measured_peak(ranks.device, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32)
        found = rows(options, ranks, peak)
        if ranks.rank == 0:
            _report(options, found, ranks.device, peak)
        else:
            deque(found, maxlen=0)


def _report(options: argparse.Namespace, found: Iterable[Row], device: torch.device, peak: float) -> None:
    """Print each row when it is measured, and write all of them."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine()
    print(f"{options.ranks} x {name}, products at {peak / 1e12:.4g} TFLOP/s, torch {torch.__version__}")
    names = f"{'tok/s':>8}{'MFU':>7}{'+prox':>7}{'prox s':>8}{'f+b s':>8}{'upd s':>7}{'GB':>7}{'kept':>6}{'first s':>8}"
    names += "  exchange"
    print(f"{'':36}{names}")
    kept = []
    for row in found:
        times = [row.seconds[name] for name in ("proximal", "forward_backward", "update")]
        print(
            f"{f'{row.shape} {row.case} {row.changed}':36}{row.tokens_per_s:8.0f}{row.mfu:7.1%}"
            f"{row.mfu_with_proximal:7.1%}{times[0]:8.3f}{times[1]:8.3f}{times[2]:7.3f}{row.peak_gb:7.1f}"
            f"{row.kept:6.0%}{row.first_step_s:8.1f}  {_told(row.exchange)}",
            flush=True,
        )
        if row.profile is not None:
            print(f"{'':36}  {row.profile}", flush=True)
        kept.append(asdict(row))
    options.profile = None if options.profile is None else str(options.profile)
    settings = {**vars(options), "peak_flops": peak, "torch": torch.__version__}
    write_result(f"learner-{device.type}{options.name}", {**settings, "rows": kept}, name)


def _told(exchange: Exchange) -> str:
    return "once an update" if exchange.once else f"in each pass, reshard={exchange.reshard:.2f}"


if __name__ == "__main__":
    main()
