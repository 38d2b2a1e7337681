"""Fetches the batch of a plan for this rank. A thread fetches the next batch while a step trains.

The thread takes the next plan once the replay's sampler can choose it. The replay records a plan before it hands the
plan out. So a step trains the same plan after a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.errors import InvariantError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.bundles import schedule_shared
from asyncrl.learner.batch.entropy_sample import entropy_share
from asyncrl.learner.batch.keeping import EpisodeKeeper, Sample
from asyncrl.learner.batch.local_batch import LocalBatch, build_episodes, build_local_batch, without_greedy
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.prefixes import Sharing, sharing_of
from asyncrl.learner.batch.schedule import Passes
from asyncrl.learner.batch.settings import BatchSettings
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.modelling.images import ImageReader
from asyncrl.modelling.packed_layout import send
from asyncrl.modelling.routing import RoutingShape
from asyncrl.modelling.vision import ImagePatches, VisionShape
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.types import BatchPlan, Trajectory

LOOK_S = 0.2
"""Seconds between two requests for a plan that does not exist yet."""


class PackedModel(Protocol):
    """The properties of a model that decide how its batches are built."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def shares_prefixes(self) -> bool: ...

    @property
    def replays(self) -> RoutingShape | None:
        """The shape of recorded expert routing, if the model can send tokens to the recorded experts. None: the model
        routes all tokens itself."""

    @property
    def vision(self) -> VisionShape | None:
        """The layout of images among the tokens. None: the model reads no images."""


@dataclass(frozen=True, slots=True, eq=False)
class FetchedBatch:
    """All that one rank needs to train a plan, and to keep a sample of it."""

    plan: BatchPlan
    minibatches: Sequence[Minibatch]
    episodes: Episodes
    batch: LocalBatch
    sample: Sample


@dataclass(eq=False)
class BatchFetcher:
    """Fetches and builds the batches of one rank, in a run of `total_steps`. `settings` returns the settings of a step.

    `reader` reads images for a policy that sees them. Nothing else may use `replay` within a `with ahead_of(...)`
    block. `spans` records the time of each fetch.
    """

    settings: Callable[[int], BatchSettings]
    total_steps: int
    ranks: Ranks
    policy: PackedModel
    flops: ForwardFlops
    replay: BatchSource
    keeper: EpisodeKeeper | None = None
    reader: ImageReader | None = None
    spans: Spans = field(default_factory=NoSpans)
    _next: tuple[int, Future[FetchedBatch | None]] | None = field(default=None, init=False)

    def take(self, plan: BatchPlan) -> FetchedBatch:
        """Return the batch of `plan`. Raises the error of a failed fetch, even if the thread made that fetch ahead."""
        ahead, self._next = self._next, None
        # A batch that was fetched ahead for another step is ignored: that step was skipped, and its fetch may have
        # failed.
        found = ahead[1].result() if ahead is not None and ahead[0] == plan.step else None
        return found if found is not None and found.plan == plan else self._fetch(plan)

    @contextmanager
    def ahead_of(self, step: int) -> Iterator[None]:
        """Fetch the batch of `step` in a thread during the block, once the step has a plan. At the end of the block all
        ranks wait for a fetch that has begun."""
        over = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="next-batch") as thread:
            fetched = thread.submit(self._fetch_ahead, step, over)
            self._next = step, fetched
            try:
                yield
                over.set()
                self.ranks.together(lambda: wait([fetched]))
            finally:
                over.set()

    def _fetch_ahead(self, step: int, over: threading.Event) -> FetchedBatch | None:
        if step >= self.total_steps:
            return None
        if self.ranks.device.type == "cuda":
            torch.cuda.set_device(self.ranks.device)
        while (plan := self.replay.plan_ahead(step)) is None:
            if over.wait(LOOK_S):
                return None
        return None if plan.skipped else self._fetch(plan)

    def _fetch(self, plan: BatchPlan) -> FetchedBatch:
        with self.spans.span("batch", "batches", step=plan.step):
            return self._build(plan)

    def _build(self, plan: BatchPlan) -> FetchedBatch:
        settings = self.settings(plan.step)
        sharing = sharing_of(settings.shared_prefixes, self.policy.shares_prefixes, self.ranks.device.type)
        recorded, plan = plan, without_greedy(plan) if settings.greedy_sibling else plan
        minibatches = self._minibatches(plan, settings, sharing)
        members = sorted(member for each in minibatches for passed in each.passes for member in passed)
        labels = self.replay.labels(plan.ids)
        trajectories = self.replay.fetch([plan.ids[member] for member in members])
        device, vocabulary = self.ranks.device, self.policy.vocabulary
        for each in trajectories:
            if int(each.tokens.max()) >= vocabulary:
                raise InvariantError(f"{each.id} has the token id {each.tokens.max()}; the policy has {vocabulary} ids")
        episodes = build_episodes(plan, labels, device, settings.greedy_sibling, settings.needs)
        routing = self.policy.replays if settings.router_replay else None
        images, vision = self._images(trajectories), self.policy.vision
        batch = build_local_batch(
            members,
            trajectories,
            device,
            sharing,
            settings.min_grammar_mass,
            routing,
            vision,
            images,
            [plan.first_trained[member] for member in members] if plan.first_trained else (),
        )
        batch = replace(batch, entropy_share=entropy_share(sum(plan.trained_tokens)))
        sample = Sample(recorded)
        if self.keeper is not None:
            own = dict(zip(members, trajectories, strict=True))
            sample = self.keeper.sample(recorded, labels, own, self.replay)
        return FetchedBatch(recorded, minibatches, episodes, batch, sample)

    def _images(self, trajectories: Sequence[Trajectory]) -> dict[bytes, ImagePatches]:
        owners = {name: each.id for each in trajectories for name in each.image_names}
        if owners and self.reader is None:
            raise InvariantError(f"{next(iter(owners.values()))} shows images, but the model of model.path reads none")
        reader = self.reader
        return {name: reader.read(self.replay.image(owner, name)) for name, owner in owners.items() if reader}

    def _minibatches(self, plan: BatchPlan, settings: BatchSettings, sharing: Sharing | None) -> list[Minibatch]:
        common = plan.shared or [0] * len(plan.ids)
        shared = [
            count if sharing is not None and sharing.takes(count, length) else 0
            for count, length in zip(common, plan.tokens, strict=True)
        ]
        ranks, limit = self.ranks, settings.micro_tokens * self.ranks.context_size
        parts = schedule_shared(plan.tokens, shared, self.flops, ranks.pass_groups, settings.minibatches, limit)
        return [Minibatch(groups[ranks.pass_group], self._totals(plan, groups)) for groups in parts]

    def _totals(self, plan: BatchPlan, groups: Sequence[Passes]) -> Totals:
        members = [member for passes in groups for members in passes for member in members]
        totals = Totals.of(plan.trained_tokens, plan.group_ids, members)
        assert totals.group_tokens is not None
        return replace(totals, group_tokens=send(totals.group_tokens, self.ranks.device))
