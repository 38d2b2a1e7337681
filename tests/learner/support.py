"""A tiny policy, random trajectories, and stand-ins for the rooms that the learner meets."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.changes import ConfigChange
from asyncrl.config.schema import (
    AlgorithmConfig,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    PartConfig,
    RunConfig,
    SftConfig,
    TrainConfig,
)
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import RenderedDemonstrations, write_rendered
from asyncrl.errors import StoppedError, TasksSolvedError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.state import Models
from asyncrl.learner.from_config import train
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.images import digest_of
from asyncrl.modelling.routing import RoutingShape, routing_shape
from asyncrl.observe.spans import Spans
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import DEMONSTRATED, BatchPlan, Finish, Role, Ticket, Trajectory, Turn, runs_of
from asyncrl.weights.buckets import Bucket, GatheredBucket, on_host
from asyncrl.weights.canary import Canary
from tests.fake_replay import FakeReplay
from tests.helpers import FakeMetrics, make_task, make_trajectory
from tests.vision import IMAGE_TOKEN, MERGE, PATCH, encoded

VOCABULARY = 280
_FILES = {encoded((columns * PATCH, rows * PATCH)): rows * columns // MERGE**2 for rows, columns in ((4, 4), (4, 8))}
FILES = {digest_of(data): data for data in _FILES}
"""Images of sizes that the tests' processor keeps."""
FILE_TOKENS = {digest_of(data): tokens for data, tokens in _FILES.items()}


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], Path]:
    """The results that `make` returns for a folder, and this folder. Of all workers of a test run, the first one that
    needs them makes them, and the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    results = folder / "made.pt"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            folder.mkdir()
            torch.save(make(folder), results)
    return torch.load(results, weights_only=False), folder


def write_model(folder: Path, layers: int = 2, seed: int = 0) -> Path:
    """A Qwen3 model of `layers` layers of 32 with its tokenizer. Its weights are large enough to have opinions."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=VOCABULARY, initializer_range=0.2, tie_word_embeddings=True, **shape, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def make_models(model: Path, ranks: Ranks) -> Models:
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    return {"policy": Trainable(policy, 0.1, LearnerConfig())}


def move(models: Models) -> None:
    """One optimiser step with gradients of ones."""
    for parameter in models["policy"].module.parameters():
        parameter.grad = torch.ones_like(parameter)
    models["policy"].update(0)


def save_whole(checkpoints: Checkpoints, progress: Progress, models: Models) -> None:
    """Save a checkpoint, and wait until it is complete."""
    checkpoints.save(progress, models)
    checkpoints.wait()


def largest_file(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda file: file.stat().st_size)


def flip_a_bit(folder: Path) -> None:
    file = largest_file(folder)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)


def make_config(model: Path, folder: Path, **learner: Any) -> TrainConfig:
    config = TrainConfig(
        run=RunConfig(name="run", dir=str(folder), seed=3),
        # On a GPU, compiling the layers of each tiny model would take minutes.
        model=ModelConfig(path=str(model), compile=False),
        data=DataConfig(train=["unused"]),
        algorithm=AlgorithmConfig(advantage=PartConfig("grpo"), loss=PartConfig("ppo")),
    )
    defaults = {"steps": 4, "batch_size": 8, "group_size": 4, "lr": 1e-3, "micro_tokens": 64, "checkpoint_every": 2}
    for name, value in {**defaults, **learner}.items():
        setattr(config.learner, name, value)
    return config


def random_trajectory(version: int, rng: np.random.Generator) -> Trajectory:
    """A prompt, and two turns with a tool's answer or the prompt of a second branch between them."""
    bounds = np.cumsum([0, *rng.integers(3, 9, 4)]).tolist()
    between = Role.PROMPT if rng.random() < 0.5 else Role.TOOL
    roles = (Role.PROMPT, Role.ASSISTANT, between, Role.ASSISTANT)
    turns = tuple(Turn(*span, role) for span, role in zip(pairwise(bounds), roles, strict=True))
    length = bounds[-1]
    mask = np.repeat([role is Role.ASSISTANT for role in roles], np.diff(bounds))
    return make_trajectory(
        tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        logprobs=np.where(mask, -rng.random(length) * 6, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=turns,
        steps=(),
    )


def as_demonstration(trajectory: Trajectory) -> Trajectory:
    """The trajectory as if no policy had sampled it."""
    versions = np.where(trajectory.loss_mask, DEMONSTRATED, -1).astype(np.int32)
    unknown = np.zeros_like(trajectory.logprobs)
    return structs.replace(trajectory, logprobs=unknown, version_runs=runs_of(versions), finish=Finish.DEMONSTRATION)


def beginning_alike(group: Sequence[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
    """The trajectories with branches that begin with parts of the same tokens, some of them sampled."""
    common, found = rng.integers(0, VOCABULARY, 40).astype(np.int32), []
    for trajectory in group:
        tokens = trajectory.tokens.copy()
        for start, end in trajectory.branches:
            stop = int(rng.integers(start, end)) + 1
            tokens[start:stop] = common[: stop - start]
        found.append(structs.replace(trajectory, tokens=tokens))
    return found


def random_routing(shape: RoutingShape, count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of `count` tokens, each of which goes to random experts."""
    drawn = rng.random((count, len(shape.layers), shape.experts))
    return shape.pack(drawn.argsort(-1)[..., : shape.top_k])


def routed(batch: Sequence[Trajectory], shape: RoutingShape, rng: np.random.Generator) -> list[Trajectory]:
    """The trajectories with random experts for most tokens; the experts of the first are none of the model's."""
    found = []
    for each in batch:
        rows = random_routing(shape, len(each), rng)
        rows[rng.random(len(each)) < 0.2] = 255
        found.append(structs.replace(each, routed_experts=rows))
    found[0] = structs.replace(found[0], routed_experts=np.zeros((len(found[0]), shape.width + 1), np.uint8))
    return found


def with_images(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The trajectory with one of FILES in front, or two, or none."""
    names = [name for name in FILES if rng.random() < 0.5]
    counts = np.array([FILE_TOKENS[name] for name in names], np.int32)
    shift, ends = int(counts.sum()), counts.cumsum()
    if not shift:
        return trajectory
    runs = trajectory.version_runs + np.array([shift, 0], np.int32)
    runs[0, 0] = 0
    first, *others = (turn._replace(start=turn.start + shift, end=turn.end + shift) for turn in trajectory.turns)
    return structs.replace(
        trajectory,
        tokens=np.concatenate([np.full(shift, IMAGE_TOKEN, np.int32), trajectory.tokens]),
        logprobs=np.concatenate([np.zeros(shift, np.float32), trajectory.logprobs]),
        version_runs=runs,
        turns=(first._replace(start=0), *others),
        image_spans=np.stack([ends - counts, ends], 1).astype(np.int32),
        image_digests=np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32),
    )


def of_ticket(trajectory: Trajectory, ticket: Ticket) -> Trajectory:
    """The trajectory as the episode of a ticket."""
    return structs.replace(trajectory, id=ticket.id, group_id=ticket.group_id, member=ticket.member)


def with_critic(config: TrainConfig) -> TrainConfig:
    """The same run with everything that an algorithm may ask for: critic, reference, entropy."""
    config.algorithm.advantage = PartConfig("gae", {"lam": 1.0})
    config.algorithm.kl = PartConfig("k3", {"weight": 0.1, "target": 0.01})
    config.algorithm.entropy_weight = 0.01
    config.critic.lr = 1e-2
    return config


def random_demonstrations(count: int, seed: int = 0) -> RenderedDemonstrations:
    """Prompts, and one or two turns of the policy."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        spans = rng.integers(2, 9, 2 * int(rng.integers(1, 3)))
        mask = np.repeat(np.arange(len(spans)) % 2 == 1, spans)
        rows.append((rng.integers(0, VOCABULARY, len(mask)).astype(np.int32), mask))
    return RenderedDemonstrations.of(rows)


def write_demonstrations(config: TrainConfig, sources: list[str], count: int, seed: int = 0) -> None:
    """Random demonstrations in the run's folder, where a start leaves what it renders of the files `sources`."""
    for source in sources:
        Path(source).parent.mkdir(parents=True, exist_ok=True)
        Path(source).touch()
    write_rendered(random_demonstrations(count, seed), run_demonstrations(config).folder(sources))


def with_demonstrations(config: TrainConfig, **sft: Any) -> TrainConfig:
    """The same run with demonstrations in addition to its episodes: see `write_demonstrations`."""
    config.algorithm.sft = SftConfig(path=[f"{config.run.dir}/shown.parquet"], **sft)
    return config


def with_group_demonstrations(config: TrainConfig, weight: str = "shaped") -> TrainConfig:
    """The same run with a demonstration in each group."""
    config.data.demonstration, config.algorithm.demonstration.weight = "target", weight
    return config


class PlannedReplay(FakeReplay):
    """Batches that depend on the seed and the step only: each is played and labelled when the plan of its step, or of a
    later one, is asked for.

    `reward` is that of the trajectories, by step, or random. The learner is stopped when it asks for the plan of step
    `stop_at`, and dies when it asks for that of `die_at`. Its tasks are solved when it asks for that of `solved_at`.
    The plan of step `skip` is skipped. A trajectory of step `poison` has a token id that the policy does not know. The
    run had the `changes` before. With `alike` the sequences of a group begin alike. With data.demonstration every group
    has a demonstration as well. A policy in a folder "vision" gets images in most episodes.
    """

    def __init__(
        self,
        config: TrainConfig,
        reward: Callable[[int], float] | None = None,
        stop_at: int | None = None,
        die_at: int | None = None,
        solved_at: int | None = None,
        skip: int | None = None,
        poison: int | None = None,
        changes: Sequence[ConfigChange] = (),
        alike: bool = False,
    ) -> None:
        learner = config.learner
        shown = [{"role": "assistant", "content": "1"}] if config.data.demonstration else []
        super().__init__(
            feed=Feed([make_task(index, demonstration=shown) for index in range(5)], seed=0, shuffle=True),
            admission=Admission(max_lag=1000, per_version=learner.batch_size),
            batch_size=learner.batch_size,
            group_size=learner.group_size,
            publish_every=learner.publish_every,
        )
        self.config = config
        self._reward = reward
        self._stop_at, self._die_at, self._skip, self._poison = stop_at, die_at, skip, poison
        self._solved_at = solved_at
        self._changes = changes
        self._alike = alike
        self._played = 0
        self.ahead: list[int] = []

    def configure(self, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
        return [*super().configure(values, time), *self._changes]

    def batch(self, step: int) -> list[tuple[Trajectory, float]]:
        """The trajectories of a step with their rewards."""
        learner = self.config.learner
        version = step // learner.publish_every
        rng = np.random.default_rng([self.config.run.seed, step])
        shows = self.config.data.demonstration is not None
        batch = [random_trajectory(max(0, version - int(rng.integers(0, 2))), rng) for _ in range(learner.batch_size)]
        for end in range(learner.batch_size, 0, -learner.group_size) if shows else ():
            batch.insert(end, as_demonstration(random_trajectory(0, rng)))
        if self._alike:
            size = learner.group_size + shows
            batch = [
                part
                for start in range(0, len(batch), size)
                for part in beginning_alike(batch[start : start + size], rng)
            ]
        if self.config.model.path.endswith("vision"):
            batch = [with_images(each, rng) for each in batch]
        if learner.router_replay:
            batch = routed(batch, routing_shape(AutoConfig.from_pretrained(self.config.model.path)), rng)
        rewards = [float(rng.random()) if self._reward is None else self._reward(step) for _ in batch]
        return list(zip(batch, rewards, strict=True))

    def plan(self, step: int) -> BatchPlan | None:
        if step in (self._stop_at, self._die_at):
            self.calls.append(("plan", step))
            raise StoppedError("stop") if step == self._stop_at else LearnerDiedError
        if step == self._solved_at:
            raise TasksSolvedError("the policy solves these tasks")
        self._play_until(step + 1)
        return super().plan(step)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        if step in (self._stop_at, self._die_at, self._solved_at):
            return None
        self._play_until(step + 1)
        self.ahead.append(step)
        return super().plan_ahead(step)

    def checkpointed(self, steps: int, kept: int) -> None:
        self._play_until(steps)
        super().checkpointed(steps, kept)

    def _play_until(self, steps: int) -> None:
        for step in range(self._played, steps):
            self._played = step + 1
            self.core.publish(step // self.config.learner.publish_every)
            batch = self.batch(step)
            if step == self._poison:
                tokens = batch[0][0].tokens.copy()
                tokens[0] = VOCABULARY
                batch[0] = (structs.replace(batch[0][0], tokens=tokens), batch[0][1])
            tickets = self.core.tickets(len(batch))
            for ticket, (trajectory, _) in zip(tickets, batch, strict=True):
                images = {name: FILES[name] for name in trajectory.image_names}
                self.core.put(of_ticket(trajectory, ticket), list(images.values()))
            for each, (_, reward) in zip(self.core.lease(), batch, strict=True):
                self.core.label(each.id, reward)
            self.core.planned(step)
            if step == self._skip:
                self.core.skip(step)

    def evaluate(self, version: int) -> None:
        self.calls.append(("evaluate", version))

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """Complete as soon as somebody waits for it, also where it was asked for before a restart."""
        self.calls.append(("evaluation", version))
        counts = {"count": 5, "tokens": 9, "newer_tokens": version + 1}
        return {"accuracy": version / 10, **counts, "sources": {}, "sample": []} if wait else None


class FakePush:
    """Keeps the weights of every version."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.canaries: dict[int, Canary | None] = {}
        self.measured = {"bytes": 5.0}

    def publish(
        self, version: int, plan: Sequence[Bucket], buckets: Iterable[GatheredBucket], canary: Canary | None
    ) -> None:
        assert version > max(self.weights, default=-1)
        self.canaries[version] = canary
        self.weights[version] = {}
        for filled in buckets:
            self.weights[version] |= on_host(filled)
        assert list(self.weights[version]) == [entry.name for bucket in plan for entry in bucket.entries]


class LearnerDiedError(Exception):
    """Takes the place of a kill of the learner's process."""


class Run:
    """One training, with what it published, measured and asked for."""

    def __init__(self, config: TrainConfig, replay: BatchSource | None = None, **replay_options: Any) -> None:
        self._config = config
        self.replay: Any = replay or PlannedReplay(config, **replay_options)
        self.push = FakePush()
        self.metrics, self.evaluations = FakeMetrics(), FakeMetrics()
        self.stop = threading.Event()

    def train(self, ranks: Ranks, spans: Spans | None = None) -> Run:
        push = self.push if ranks.rank == 0 else None
        train(self._config, ranks, self.replay, push, self.metrics, self.evaluations, self.stop, spans)
        return self

    def until_stopped(self, ranks: Ranks) -> Run:
        with pytest.raises((StoppedError, LearnerDiedError)):
            self.train(ranks)
        return self

    @property
    def weights(self) -> dict[int, dict[str, Tensor]]:
        return self.push.weights

    @property
    def final(self) -> dict[str, Tensor]:
        return self.weights[max(self.weights)]


def assert_weights_close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], atol: float) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_weights_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def random_sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
