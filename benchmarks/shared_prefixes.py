"""Measures how much time the learner saves by computing a group's prompt once.

The members of a group have a common prompt and different answers. The models are Qwen3 shapes with random weights. A
step has one update, in the passes of the learner's schedule.

Rates count the tokens of whole sequences, including the shared tokens. Times are medians of `--runs` steps after a
warm-up step: wall-clock time with an idle GPU at both ends, or processor time on the CPU.

`--errors` computes one group in float32 without sharing, and in the GPU's dtype with and without sharing. It prints how
much the latter two differ from float32: the largest difference of log-probs, and the relative norm of the gradient's
difference.

    python -m benchmarks.shared_prefixes --shape 0.6B --prompts 128 1024 4096 --answers 512 2048 --errors
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.learner.batch.bundles import schedule_shared
from asyncrl.learner.batch.local_batch import LocalBatch, build_episodes, build_local_batch
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.types import BatchPlan, Finish, Labels, Role, Trajectory, Turn, runs_of
from benchmarks.learner import Stopwatch, Timed, make_trainer
from benchmarks.record import machine, write_result


@dataclass(frozen=True)
class Row:
    """One case: passes of an update, seconds of forward, backward and update, tokens of whole sequences a second, and
    peak memory in GB (on GPUs)."""

    prompt: int
    answer: int
    shared: bool
    passes: int
    seconds: float
    tokens_per_s: float
    peak_gb: float


@dataclass(frozen=True)
class Case:
    """`groups` groups of `members` sequences, each with `prompt` and then `answer` tokens."""

    groups: int
    members: int
    prompt: int
    answer: int

    @property
    def lengths(self) -> list[int]:
        return [self.prompt + self.answer] * self.groups * self.members

    def trajectories(self, vocabulary: int, step: int) -> Iterator[Trajectory]:
        rng = np.random.default_rng(step)
        mask = np.repeat([False, True], [self.prompt, self.answer])
        for group in range(self.groups):
            prompt = rng.integers(0, vocabulary, self.prompt)
            for member in range(self.members):
                yield Trajectory(
                    id=f"{group}.{member}",
                    task_id="task",
                    group_id=str(group),
                    member=member,
                    tokens=np.concatenate([prompt, rng.integers(0, vocabulary, self.answer)]).astype(np.int32),
                    logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
                    version_runs=runs_of(np.where(mask, 0, -1).astype(np.int32)),
                    turns=(Turn(0, self.prompt, Role.PROMPT), Turn(self.prompt, len(mask), Role.ASSISTANT, "stop")),
                    steps=(),
                    finish=Finish.COMPLETED,
                )

    def batch(
        self, policy: Policy, step: int, shared: bool, micro_tokens: int, device: torch.device
    ) -> tuple[LocalBatch, Episodes, Minibatch]:
        made, rng = list(self.trajectories(policy.vocabulary, step)), np.random.default_rng(step)
        sampled = [self.answer] * len(made)
        ids, groups = [each.id for each in made], [each.group_id for each in made]
        plan = BatchPlan(step, 1, ids, groups, self.lengths, sampled, [1.0] * len(made))
        labels = [Labels(each.id, reward=float(rng.random()), outcome=0.0, scorer="random") for each in made]
        common = [self.prompt if shared and each.member else 0 for each in made]
        flops = ForwardFlops.of(policy, policy.model.config)
        ((passes,),) = schedule_shared(self.lengths, common, flops, 1, 1, max(micro_tokens, *self.lengths))
        batch = build_local_batch(range(len(made)), made, device, EVERY if shared else None)
        return batch, build_episodes(plan, labels, device), Minibatch(passes, Totals(sum(sampled), len(made)))


def measure(trainer: Trainer, case: Case, shared: bool, micro_tokens: int, runs: int) -> Row:
    device, policy = trainer.ranks.device, trainer.policy
    assert isinstance(policy, Timed)
    seconds = []
    for step in range(runs + 1):
        batch, episodes, minibatch = case.batch(policy.module, step, shared, micro_tokens, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        policy.watch = Stopwatch(device)
        prepared = trainer.prepare(batch, episodes, [minibatch])
        started = _seconds(device)
        trainer.learn(0, prepared, episodes, [minibatch])
        seconds.append(_seconds(device) - started)
    median = statistics.median(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    rate = sum(case.lengths) / median
    return Row(case.prompt, case.answer, shared, len(minibatch.passes), median, rate, peak)


def _seconds(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def errors(shape: str, case: Case, ranks: Ranks) -> dict[str, tuple[float, float]]:
    """The largest error of a log-prob and the relative error of the gradient, by name."""
    half = "bfloat16" if ranks.device.type == "cuda" else "float32"
    logprobs, gradients = {}, {}
    for name, dtype, shared in (("float32", "float32", False), ("unshared", half, False), ("shared", half, True)):
        policy = _trainer(shape, ranks, {"model.dtype": dtype, "model.compile": dtype != "float32"}).policy.module
        sequences = [torch.from_numpy(each.tokens).long() for each in case.trajectories(policy.vocabulary, 0)]
        packed = PackedSequences.of(sequences, EVERY if shared else None).to(ranks.device)
        logprobs[name], _ = policy(packed)
        weights = torch.randn(len(logprobs[name]), generator=torch.Generator().manual_seed(0)).to(ranks.device)
        (logprobs[name] * weights).mean().backward()
        gradients[name] = [_whole(each.grad).cpu() for each in policy.parameters() if each.grad is not None]
        logprobs[name] = logprobs[name].detach().cpu()
        del policy
        _free()
    return {
        name: (
            float((logprobs[name] - logprobs["float32"]).abs().max()),
            _norm([a - b for a, b in zip(gradients[name], gradients["float32"], strict=True)])
            / _norm(gradients["float32"]),
        )
        for name in ("unshared", "shared")
    }


def _trainer(shape: str, ranks: Ranks, changes: Mapping[str, Any]) -> Trainer:
    return make_trainer(shape, {"model.activations": 1.0, **changes}, ranks, 0, None)[0]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--answers", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=16384, help="learner.micro_tokens")
    parser.add_argument("--runs", type=int, default=3, help="measured steps")
    parser.add_argument("--errors", action="store_true", help="compare with float32")
    options = parser.parse_args()
    with joined() as ranks:
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else machine()
        print(f"{device}, {options.shape}, {options.groups} x {options.members}, torch {torch.__version__}")
        print(f"{'prompt':>8}{'answer':>8}{'passes':>14}{'seconds':>16}{'GB':>14}{'tok/s':>18}{'faster':>8}")
        trainer, found = _trainer(options.shape, ranks, {}), []
        for prompt, answer in itertools.product(options.prompts, options.answers):
            case = Case(options.groups, options.members, prompt, answer)
            plain, shared = (measure(trainer, case, each, options.micro_tokens, options.runs) for each in (False, True))
            print(
                f"{prompt:8}{answer:8}{plain.passes:8}{shared.passes:6}{plain.seconds:9.2f}{shared.seconds:7.2f}"
                f"{plain.peak_gb:8.1f}{shared.peak_gb:6.1f}{plain.tokens_per_s:10.0f}{shared.tokens_per_s:8.0f}"
                f"{plain.seconds / shared.seconds:8.2f}",
                flush=True,
            )
            found += [asdict(plain), asdict(shared)]
        del trainer
        _free()
        compared = {}
        if options.errors:
            compared = errors(options.shape, Case(1, options.members, options.prompts[-1] // 4, 512), ranks)
            for name, (logprob, gradient) in compared.items():
                print(f"{name}: log-probs differ from float32 by up to {logprob:.3g}, the gradient by {gradient:.3%}")
    settings = {**vars(options), "torch": torch.__version__}
    write_result(
        f"shared-prefixes-{ranks.device.type}", {**settings, "rows": found, "errors_of_float32": compared}, device
    )


if __name__ == "__main__":
    main()
