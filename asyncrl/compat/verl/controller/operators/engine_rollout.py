"""`EngineRollout`: verl's interface of a rollout over asyncrl's embedded engine, without a worker group."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.operators.generation import generated, joined_parts, numbered
from asyncrl.compat.verl.controller.operators.policy import PolicyParts
from asyncrl.compat.verl.controller.operators.rollout import Rollout
from asyncrl.compat.verl.rollouts import BaseRollout
from asyncrl.errors import ConfigError, EngineError

T = TypeVar("T")
WEIGHTS, CACHE = "weights", "kv_cache"
"""verl's tags of memory."""
NAMED_TENSORS = "named_tensors"


class EngineRollout(BaseRollout):
    """Runs episodes, with the tools or agent of a configuration, on an embedded engine of its own.

    `EngineRollout(policy_parts(config))` opens it. It can generate only after the first `update_weights`. Its
    coroutines run in any event loop, and `generate_sequences` needs none. `close` ends it, and so does the end of a
    `with` block.

    Raises ConfigError: the model, a tool or the agent cannot be used, or the engine is not embedded.
    """

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(None, None, None)
        self._parts = parts
        self._released: set[str] = set()
        self._has_weights = False
        self._version = -1
        # A Rollout is used from one thread, and has an event loop there.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-rollout")
        self._rollout: Rollout | None = self._thread.submit(parts.rollout).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version of the served weights: the `global_steps` of the last update, or if it had none, one more than
        the version before. It is -1 before the first weights."""
        return self._version

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run an episode for each prompt, as the operator of this name does.

        Raises DataProtoError: the prompts have no uid. Raises EngineError: memory is released, there are no weights, or
        no group is complete.
        """
        if self._released:
            raise EngineError(f"{', '.join(sorted(self._released))}: this memory is released; call resume")
        if not self._has_weights:
            raise EngineError("the engine has no weights: call update_weights")
        given = numbered(prompts)
        return joined_parts([self._thread.submit(generated, given, self._parts.sampling, self._opened()).result()])

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = NAMED_TENSORS,
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Serve copies of these named tensors. The names are those of the model's Hugging Face folder.

        `global_steps` becomes the version of the weights. Raises WeightsError (and changes nothing): names or shapes
        differ from the model's, or the version is not newer. Raises ConfigError: the weights are adapters, or come in
        another format. Raises EngineError: the memory of weights is released.
        """
        if kwargs:
            raise ConfigError(
                f"{', '.join(sorted(kwargs))}: weights are updated without such arguments; leave them out"
            )
        if wire_format != NAMED_TENSORS or peft_config is not None or not base_sync_done:
            raise ConfigError(
                f"wire_format={wire_format}: give all weights as {NAMED_TENSORS}; merge adapters into the weights"
            )
        if WEIGHTS in self._released:
            raise EngineError("the memory of the weights is released: call resume(['weights'])")
        version = self._version + 1 if global_steps is None else global_steps
        tensors = {name: tensor.detach().clone() for name, tensor in weights}
        rollout = self._opened()
        await self._in_thread(lambda: rollout.update(version, tensors))
        self._version, self._has_weights = version, True

    async def release(self) -> None:
        """Close the engine, which frees its weights and cache. It needs new weights after `resume`."""
        rollout, self._rollout = self._rollout, None
        self._released, self._has_weights = {WEIGHTS, CACHE}, False
        if rollout is not None:
            await self._in_thread(rollout.close)
            del rollout
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    async def resume(self, tags: list[str]) -> None:
        """Take memory again: `weights` opens the engine, and `kv_cache` allows generation.

        The engine has one memory for both, so `kv_cache` alone opens it too. Raises ConfigError: a tag does not exist.
        """
        if unknown := sorted(set(tags) - {WEIGHTS, CACHE}):
            raise ConfigError(f"tags={unknown}: the tags are {WEIGHTS} and {CACHE}")
        if self._rollout is None and tags:
            self._rollout = await self._in_thread(self._parts.rollout)
        self._released -= set(tags)

    def close(self) -> None:
        """End the engine."""
        if self._rollout is not None:
            self._thread.submit(self._rollout.close).result()
            self._rollout = None
        self._thread.shutdown()

    def _opened(self) -> Rollout:
        if self._rollout is None:
            raise EngineError("the rollout is closed; make another one")
        return self._rollout

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(call))
