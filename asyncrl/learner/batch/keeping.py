"""Keeps a sample of the episodes of each step for people to read.

All ranks choose the same groups. Rank 0 fetches their trajectories, labels and tasks from the replay. Each rank sends
rank 0 the advantages, importance weights and proximal log-probs of its own tokens. Training does not depend on any of
this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import RefusedError, StoreError, WireError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.local_batch import LocalBatch
from asyncrl.learner.batch.settings import KeepSettings
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.observe.kept.episode import ARRAYS, BEST, HELD_OUT, RANDOM, WORST, KeptEpisode, KeptStep, row_of
from asyncrl.observe.kept.format import EVALUATED_FOLDER
from asyncrl.observe.kept.recording import KeptRecorder
from asyncrl.observe.kept.showing import logged
from asyncrl.observe.kept.writing import LARGEST_STEP
from asyncrl.observe.metrics import HELD_OUT_EPISODES, TRAINED_EPISODES, Sink
from asyncrl.types import NO_ROUTING, BatchPlan, Labels, Task, Trajectory

logger = logging.getLogger(__name__)

BYTES_A_TOKEN = 32
"""The bytes of a kept token: 4 each for its id, two log-probs, its advantage, its importance weight and its grammar
mass, and 8 for the rest, such as the turns."""


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """The episodes of a plan that were chosen to be kept.

    - `members`: the indices of the kept episodes in the plan, group by group.
    - `why`: maps the index of a kept episode to the reasons to keep it.
    - `left_out`: the number of groups that are too large to be kept.
    """

    members: Sequence[int] = ()
    why: Mapping[int, Sequence[str]] = field(default_factory=dict)
    left_out: int = 0


def choose(plan: BatchPlan, rewards: Sequence[float], groups: int, max_bytes: int, seed: int) -> KeptChoice:
    """Choose the group with the best episode, the group with the worst, and random groups, at most `groups` in total.

    A step may take the share LARGEST_STEP of `max_bytes`, and a group one part of `groups` of this. Larger groups are
    left out. A tie for the best or the worst is broken at random.
    """
    largest = LARGEST_STEP * max_bytes / max(1, groups)
    found: dict[str, list[int]] = {}
    for index, name in enumerate(plan.group_ids):
        found.setdefault(name, []).append(index)
    fitting = {
        name: members
        for name, members in found.items()
        if BYTES_A_TOKEN * sum(plan.tokens[each] for each in members) <= largest
    }
    left_out = len(found) - len(fitting)
    if not fitting or not groups:
        return KeptChoice(left_out=left_out if groups else 0)
    rng = np.random.default_rng([seed, plan.step])
    order = rng.permutation([each for members in fitting.values() for each in members]).tolist()
    best, worst = max(order, key=rewards.__getitem__), min(order, key=rewards.__getitem__)
    # The dictionary has only one name if the same group has the best and the worst episode.
    names = dict.fromkeys([plan.group_ids[best], plan.group_ids[worst]])
    ends = len(names)
    names |= dict.fromkeys(rng.permutation(list(fitting)).tolist())
    chosen = list(names)[:groups]
    members = [each for name in chosen for each in fitting[name]]
    why: dict[int, list[str]] = {each: [] for each in members}
    for flag, each in ((BEST, best), (WORST, worst)):
        if each in why:
            why[each].append(flag)
    for name in chosen[ends:]:
        for each in fitting[name]:
            why[each].append(RANDOM)
    return KeptChoice(members, why, left_out)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The kept episodes of a step before it is trained. Only rank 0 has the trajectories and labels of these episodes,
    in the order of `choice.members`, and the tasks by group."""

    plan: BatchPlan
    choice: KeptChoice = field(default_factory=KeptChoice)
    trajectories: Sequence[Trajectory] = ()
    labels: Sequence[Labels] = ()
    tasks: Mapping[str, Task | None] = field(default_factory=dict)

    def with_numbers(self, numbers: NDArray[np.float32]) -> KeptStep:
        """Return the sample with `numbers` float32[3, T]. Its rows are the `ARRAYS`. Its columns are the T tokens of
        the kept episodes, one episode after another."""
        plan, ends = self.plan, accumulate(len(each) for each in self.trajectories)
        episodes = []
        for index, trajectory, labels, (start, end) in zip(
            self.choice.members, self.trajectories, self.labels, pairwise([0, *ends]), strict=True
        ):
            task = self.tasks.get(trajectory.group_id)
            masked = plan.sampled[index] - plan.trained_tokens[index]
            row = row_of(plan.step, plan.version, trajectory, labels, task, self.choice.why[index], masked)
            arrays = dict(zip(ARRAYS, numbers[:, start:end], strict=True))
            # The experts of single tokens are of little use to a reader, and take more bytes than everything else.
            played = structs.replace(trajectory, routed_experts=NO_ROUTING)
            episodes.append(KeptEpisode(row, played, labels, task, **arrays))
        return KeptStep(plan.step, episodes)


class EpisodeKeeper:
    """Keeps a sample of each step that this run trains, and of each evaluation. Only rank 0 has recorders: `recorder`
    for steps, and `evaluated` for held-out episodes."""

    def __init__(
        self, settings: KeepSettings, ranks: Ranks, recorder: KeptRecorder | None, evaluated: KeptRecorder | None = None
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._recorder = recorder
        self._evaluated = evaluated

    def close(self) -> None:
        for each in (self._recorder, self._evaluated):
            if each is not None:
                each.close()

    def values(self) -> dict[str, float]:
        """Return the metrics of the kept episodes."""
        values = {} if self._recorder is None else self._recorder.values()
        if self._evaluated is not None:
            evaluated = self._evaluated.values()
            values |= {f"{name}_evaluated": evaluated[name] for name in ("kept/episodes", "kept/bytes", "kept/lost")}
        return values

    def keep_evaluated(self, step: int, version: int, names: Sequence[str], replay: BatchSource) -> None:
        """Keep the held-out episodes `names`. They evaluated `version`, which has the weights after `step` steps. Only
        rank 0 calls this."""
        if self._evaluated is None or not names:
            return
        try:
            trajectories, labels = replay.fetch(names), replay.labels(names)
            tasks = [replay.task(name) for name in names]
        except (RefusedError, StoreError, WireError) as error:
            self._evaluated.lose(error)
            return
        self._evaluated.put(lambda: _evaluated_step(step, version, trajectories, labels, tasks))

    def sample(
        self, plan: BatchPlan, labels: Sequence[Labels], own: Mapping[int, Trajectory], replay: BatchSource
    ) -> Sample:
        """Choose the episodes of a plan to keep. Rank 0 fetches the chosen trajectories that `own` lacks. `own` maps
        indices in the plan to the trajectories that this rank trains."""
        settings, rewards = self._settings, [each.reward for each in labels]
        choice = choose(plan, rewards, settings.groups, settings.of_training, settings.seed)
        if self._recorder is not None and choice.members:
            try:
                return self._fetched(plan, choice, labels, own, replay)
            except (RefusedError, StoreError, WireError) as error:
                self._recorder.lose(error)
        return Sample(plan, choice)

    def _fetched(
        self,
        plan: BatchPlan,
        choice: KeptChoice,
        labels: Sequence[Labels],
        own: Mapping[int, Trajectory],
        replay: BatchSource,
    ) -> Sample:
        missing = [each for each in choice.members if each not in own]
        others = dict(zip(missing, replay.fetch([plan.ids[each] for each in missing]), strict=True))
        firsts = {plan.group_ids[each]: plan.ids[each] for each in reversed(choice.members)}
        return Sample(
            plan,
            choice,
            [own[each] if each in own else others[each] for each in choice.members],
            [labels[each] for each in choice.members],
            {group: replay.task(name) for group, name in firsts.items()},
        )

    def seen(self, sample: Sample, batch: LocalBatch) -> Tensor | None:
        """Return a tensor float32[N] into which the training passes write the policy's log-probs. Returns None if no
        episode is kept."""
        return torch.zeros_like(batch.tokens.behaviour) if sample.choice.members else None

    def keep(self, sample: Sample, algorithm: Algorithm, batch: LocalBatch, seen: Tensor | None) -> None:
        """Keep the sample of a trained step. `seen` has the policy's log-probs from the step's passes. All ranks call
        this."""
        if self._recorder is not None:
            self._recorder.leave_out(sample.choice.left_out)
        if seen is None:
            return
        numbers = self._ranks.sum_pass_groups(self._numbers(sample, algorithm, batch, seen))
        if self._recorder is None or not sample.trajectories:
            return
        if numbers[-1] > 0:
            self._recorder.lose("a rank failed to compute the numbers of its tokens")
        else:
            self._recorder.put(partial(sample.with_numbers, numbers[:-1].view(len(ARRAYS), -1).numpy()))

    def _numbers(self, sample: Sample, algorithm: Algorithm, batch: LocalBatch, seen: Tensor) -> Tensor:
        """Compute the `ARRAYS` of the sample's T tokens, as float32[3 T + 1] on the CPU. They are 0 at the tokens that
        other ranks train. The last number is 1 if this rank failed, else 0."""
        plan, members = sample.plan, sample.choice.members
        ends = list(accumulate(plan.tokens[each] for each in members))
        numbers = torch.zeros(len(ARRAYS) * ends[-1] + 1)
        table = numbers[:-1].view(len(ARRAYS), -1)
        spans = {each: slice(start, end) for each, (start, end) in zip(members, pairwise([0, *ends]), strict=True)}
        own = [each for each in members if each in batch.lengths]
        try:
            found = _own_numbers(own, algorithm, batch, seen) if own else torch.zeros(len(ARRAYS), 0)
            for each, part in zip(own, found.split([plan.tokens[each] for each in own], 1), strict=True):
                table[:, spans[each]] = part
        except Exception:
            logger.exception("the episodes of step %d are not kept", plan.step)
            numbers[-1] = 1
        return numbers


def _own_numbers(members: Sequence[int], algorithm: Algorithm, batch: LocalBatch, seen: Tensor) -> Tensor:
    """Compute `ARRAYS` of the tokens of `members`, which this rank trained, float32[3, T] on the CPU."""
    rows = batch.rows(members).to(seen.device)
    tokens = batch.tokens.select(rows)
    assert tokens.advantages is not None
    proximal, weights = algorithm.importance(seen[rows], tokens)
    return torch.stack([tokens.advantages, weights, proximal]).float().cpu()


def _evaluated_step(
    step: int,
    version: int,
    trajectories: Sequence[Trajectory],
    labels: Sequence[Labels],
    tasks: Sequence[Task | None],
) -> KeptStep:
    episodes = []
    for trajectory, judged, task in zip(trajectories, labels, tasks, strict=True):
        row = row_of(step, version, trajectory, judged, task, [HELD_OUT])
        untrained = dict.fromkeys(ARRAYS, np.zeros(len(trajectory), np.float32))
        episodes.append(KeptEpisode(row, trajectory, judged, task, **untrained))
    return KeptStep(step, episodes)


def open_keeper(
    settings: KeepSettings, run_dir: Path, model: ModelConfig, ranks: Ranks, metrics: Sink
) -> EpisodeKeeper:
    """Open the keeper of one rank, for the run in `run_dir`. If the settings upload samples, `metrics` gets their text,
    which the tokenizer of `model` decodes."""
    recorder = evaluated = None
    of_evaluations = settings.max_bytes - settings.of_training
    if ranks.rank == 0 and settings.groups:
        upload = _upload(model, metrics, TRAINED_EPISODES) if settings.uploads else None
        recorder = KeptRecorder(run_dir, settings.of_training, upload)
    if ranks.rank == 0 and of_evaluations:
        upload = _upload(model, metrics, HELD_OUT_EPISODES) if settings.uploads else None
        evaluated = KeptRecorder(run_dir, of_evaluations, upload, EVALUATED_FOLDER)
    return EpisodeKeeper(settings, ranks, recorder, evaluated)


def _upload(model: ModelConfig, metrics: Sink, table: str) -> Callable[[KeptStep], None]:
    """Return a function that gives the text of samples to `metrics`, for this table. Its first call loads the
    tokenizer."""

    @cache
    def tokenizer() -> Any:
        return open_tokenizer(model)

    def decode(ids: list[int]) -> str:
        return str(tokenizer().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return lambda kept: metrics.episodes(kept.step, [logged(each, decode) for each in kept.episodes], table)
