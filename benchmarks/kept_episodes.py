"""Measures how fast a reader opens 10^5 kept episodes, and how much time a step takes for keeping some.

The run has 4,200 steps, each with 3 groups of 8 episodes of 200 tokens. Opening is `KeptEpisodes.rows` of a new reader;
`again` is the next call after one more step.

Then the training thread and its two helper threads keep 3 groups of 8 of a batch of 64 episodes, with up to 1,000 and
up to 8,000 tokens each. Opening and reading are wall-clock time, keeping is processor time of a thread. Each figure is
the median of five.

    python -m benchmarks.kept_episodes
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import AlgorithmConfig, ObserveConfig
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.from_config import keep_settings
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.observe.kept.episode import KeptEpisode, KeptStep, row_of
from asyncrl.observe.kept.recording import KeptRecorder
from asyncrl.observe.kept.writing import KeptWriter
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import BatchPlan, Finish, Labels, Role, Step, Task, ToolCall, Trajectory, Turn, runs_of
from benchmarks.record import write_result

STEPS, GROUPS, SIZE = 4200, 3, 8
CALL = (ToolCall("calculator", {"expression": "1 + 1"}),)


def played(step: int, group: int, member: int, length: int) -> Trajectory:
    """An episode with a tool call: a prompt of a quarter of the tokens, then turns of the policy with a tool result
    between them."""
    bounds = [0, length // 4, length // 2, length // 2 + length // 8, length]
    roles = (Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
    turns = [Turn(start, end, role) for start, end, role in zip(bounds, bounds[1:], roles, strict=False)]
    turns[1] = turns[1]._replace(tool_calls=CALL)
    versions = np.full(length, -1, np.int32)
    for turn in (turns[1], turns[3]):
        versions[turn.start : turn.end] = step
    name = f"t{step * GROUPS + group:09d}"
    return Trajectory(
        id=f"{name}.{member}.0",
        task_id=f"examples/train/{group}",
        group_id=name,
        member=member,
        tokens=np.arange(length, dtype=np.int32),
        logprobs=np.where(versions >= 0, -0.5, 0).astype(np.float32),
        version_runs=runs_of(versions),
        turns=tuple(turns),
        steps=(Step(turns[1].start, turns[1].end),),
        finish=Finish.COMPLETED,
    )


def judged(trajectory: Trajectory) -> Labels:
    return Labels(trajectory.id, float(trajectory.member), 1.0, "exact_number", extra={"rules": 1.0, "accuracy": 1.0})


def step_of(step: int) -> KeptStep:
    episodes = []
    for group in range(GROUPS):
        task = Task(f"examples/train/{group}", [{"role": "user", "content": "1 + 1?"}], "2", "examples")
        for member in range(SIZE):
            trajectory = played(step, group, member, 200)
            labels, numbers = judged(trajectory), np.zeros(200, np.float32)
            row = row_of(step, step, trajectory, labels, task, ("random",))
            episodes.append(KeptEpisode(row, trajectory, labels, task, numbers, numbers, numbers))
    return KeptStep(step, episodes)


def seconds(work: Callable[[], object], times: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    taken = []
    for _ in range(times):
        started = clock()
        work()
        taken.append(clock() - started)
    return median(taken)


def opening(run: Path) -> dict[str, Any]:
    writer = KeptWriter(run, 1 << 40)
    started = time.perf_counter()
    for step in range(STEPS):
        writer.add(step_of(step))
    writing = time.perf_counter() - started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = KeptEpisodes(run)
    first = seconds(kept.rows, 1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    rest = [seconds(KeptEpisodes(run).rows, 1) for _ in range(4)]
    row = kept.rows()[STEPS]
    writer.add(step_of(STEPS))
    return {
        "episodes": len(kept.rows()) - GROUPS * SIZE,
        "steps": STEPS,
        "index_mb": (run / "episodes" / "index.jsonl").stat().st_size / 1e6,
        "files_mb": writer.bytes / 1e6,
        "write_ms_a_step": 1e3 * writing / STEPS,
        "open_s": median([first, *rest]),
        "open_memory_mb": memory / 1e3,
        "again_ms": 1e3 * _again(kept, writer),
        "episode_ms": 1e3 * seconds(lambda: kept.read(row.step, row.id)),
        "group_ms": 1e3 * seconds(lambda: kept.group(row.step, row.group_id)),
    }


def _again(kept: KeptEpisodes, writer: KeptWriter) -> float:
    def one_more() -> float:
        writer.add(step_of(writer_steps.pop()))
        return seconds(kept.rows, 1)

    writer_steps = list(range(STEPS + 1, STEPS + 6))
    return median(one_more() for _ in range(5))


class Fetched:
    """A replay from which a rank fetches nothing, since it has all trajectories of its sample."""

    def fetch(self, ids: Any) -> list[Trajectory]:
        assert not ids
        return []

    def task(self, name: str) -> Task | None:
        return None


def keeping(run: Path, longest: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 2, longest, 64).tolist()
    trajectories = [played(0, index // SIZE, index % SIZE, length) for index, length in enumerate(lengths)]
    labels = [judged(each) for each in trajectories]
    plan = BatchPlan(
        step=0,
        version=0,
        ids=[each.id for each in trajectories],
        group_ids=[each.group_id for each in trajectories],
        tokens=lengths,
        sampled=[each.sampled_tokens for each in trajectories],
        weights=[1.0] * len(trajectories),
    )
    batch = build_local_batch(range(64), trajectories, torch.device("cpu"))
    episodes = build_episodes(plan, labels, torch.device("cpu"))
    algorithm = Algorithm.from_config(AlgorithmConfig())
    batch = replace(batch, tokens=algorithm.prepare(episodes, batch.tokens, lambda values: values))
    observe = ObserveConfig()
    recorder = Recorder(run, observe.keep_episodes_mb << 20)
    keeper = EpisodeKeeper(keep_settings(observe, seed=0), Ranks.alone(), recorder)
    own, replay = dict(enumerate(trajectories)), cast(BatchSource, Fetched())
    sample = keeper.sample(plan, labels, own, replay)

    def on_the_training_thread() -> None:
        seen = keeper.seen(sample, batch)
        assert seen is not None
        seen[torch.arange(len(seen))] = batch.tokens.behaviour
        keeper.keep(sample, algorithm, batch, seen)

    training = seconds(on_the_training_thread, clock=time.thread_time)
    writer = KeptWriter(run, 1 << 40)
    result = {
        "tokens": sum(lengths),
        "kept_tokens": sum(lengths[each] for each in sample.choice.members),
        "fetch_thread_ms": 1e3 * seconds(lambda: keeper.sample(plan, labels, own, replay), clock=time.thread_time),
        "training_thread_ms": 1e3 * training,
        "writing_thread_ms": 1e3 * seconds(lambda: writer.add(recorder.made[-1]()), clock=time.thread_time),
        "file_mb": writer.bytes / 1e6,
    }
    keeper.close()
    return result


class Recorder(KeptRecorder):
    """Runs its tasks on request, so that each can be timed."""

    def __init__(self, run: Path, max_bytes: int) -> None:
        super().__init__(run, max_bytes)
        self.made: list[Callable[[], KeptStep]] = []

    def put(self, make: Callable[[], KeptStep]) -> None:
        self.made.append(make)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "opening": opening(Path(folder, "open")),
            "keeping": {str(longest): keeping(Path(folder, str(longest)), longest) for longest in (1000, 8000)},
        }
    for name, values in (("opening", result["opening"]), *result["keeping"].items()):
        print(name, {key: round(value, 2) for key, value in values.items()})
    print(write_result("kept_episodes", result))


if __name__ == "__main__":
    main()
