"""What the learner asks of other rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.types import BatchPlan, Labels, Trajectory
from asyncrl.weights.buckets import Bucket, Filled

Reduce = Callable[[Tensor], Tensor]


class Replay(Protocol):
    """Where batches come from; `asyncrl.replay.client.ReplayClient` is one. Calls wait until the replay answers, and
    raise StoppedError when this process is asked to stop meanwhile."""

    def plan(self, step: int) -> BatchPlan | None: ...

    def labels(self, ids: Sequence[str]) -> list[Labels]: ...

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]: ...

    def published(self, version: int) -> None: ...

    def checkpointed(self, steps: int, kept: int) -> None: ...

    def evaluate(self, version: int) -> None: ...

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None: ...


class Publisher(Protocol):
    """Where weights go; `asyncrl.weights.push.Push` is one."""

    @property
    def measured(self) -> Mapping[str, float]: ...

    def publish(self, version: int, plan: Sequence[Bucket], buckets: Iterable[Filled]) -> None: ...


class Algorithm(Protocol):
    """What is optimised; `asyncrl.algorithms.compose.Algorithm` is one."""

    @property
    def needs_proximal(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_critic(self) -> bool: ...

    def state(self) -> dict[str, float]: ...

    def restore(self, state: Mapping[str, float]) -> None: ...

    def prepare(self, episodes: Episodes, tokens: Tokens, reduce: Reduce) -> Tokens: ...

    def loss(
        self, logprobs: Tensor, tokens: Tokens, totals: Totals, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def value_loss(self, values: Tensor, tokens: Tokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]: ...

    def implicit_loss(
        self, log_ratio: Tensor, outcome: Tensor, tokens: Tokens, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, float]: ...
