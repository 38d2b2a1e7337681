"""The embedded engine: continuous batching over a Hugging Face causal LM in this process, on the CPU or one GPU.

One thread owns the model, the cache and the scheduler. Callers queue commands for the thread and await futures. The
thread runs commands only between two forward passes, so a weight switch, a new request or an abort never interrupts a
pass. On a GPU, passes are CUDA graphs if the model allows it: see engine/graphed.

Exactness: a token's log-prob equals that of a plain forward pass over all tokens before it, under its recorded version.
So a weight switch drops all keys and values. Running sequences are prefilled again under the new weights and continue;
idle sessions are prefilled again at their next turn. If the log-probs of the canary are wrong under the new weights
(see weights/canary.py), the engine returns to the old weights.

With `keep_cache` a session keeps its keys and values instead. Then a log-prob still belongs to the distribution from
which the token was sampled. But this distribution also depends on versions that are older than the recorded version.

Sampling depends only on the logits, the seed, the session's name and the position. The last bits of the logits may
change with the shape of the batch, as in every batched engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.config.schema.engine import LARGEST_INTEGER
from asyncrl.engine.base import EngineStats, Generation, IdleClock, PlacedImage, check_ids
from asyncrl.engine.graphed.opening import open_passes
from asyncrl.engine.own_weights import OwnWeights
from asyncrl.engine.passes import SampledTokens
from asyncrl.engine.sampling import request_key
from asyncrl.engine.scheduler import Request, Scheduler
from asyncrl.errors import EngineError, WeightsError
from asyncrl.machine.long_work import unmeasured_work
from asyncrl.modelling.devices import described, on_device
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.routers import route_in_float32
from asyncrl.modelling.source import source_of
from asyncrl.network.throttle import ErrorLogger
from asyncrl.types import NO_VERSION, Sampling
from asyncrl.weights.canary import INT4, QUANTIZED, CanaryCheck, CanaryError, CanaryJudge
from asyncrl.weights.folders import Weights, tensors_of
from asyncrl.weights.manifest import dtype_name
from asyncrl.weights.threads import in_own_thread

logger = logging.getLogger(__name__)

SLOT_TOKENS = 4096
"""The length of a slot if neither `engine.max_length` nor the longest episode decides it."""

LEAST_SHARED = 32
"""The `least_shared` of the `Scheduler` for passes of fixed shapes. A GPU computes hundreds of sequences in a pass, so
a few more tokens take hardly more time."""


class EmbeddedEngine:
    """An `Engine` (see base) over `model`. The engine owns the model and replaces its attention.

    - `model` must have `config.dtype` already, unless this is an integer dtype. In that case the engine rounds the
      model's matrices.
    - `initial_version` is the policy version of the model's weights. Without it, generation waits for the first update.
    - `prefill_tokens` limits the prompt tokens of one pass.
    - `static`: use passes of fixed shapes, which a GPU replays as CUDA graphs. None: use them on a GPU
    - `clock` gives the seconds of `stats`.

    Raises ConfigError for one of these reasons:

    - the model has fewer than `max_length` positions, or its attention does not fit a slot cache
    - weights in the published format cannot be converted into the model's format
    - `config` asks for the experts that computed each token, and the model has no experts that can be returned
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        seed: int = 0,
        initial_version: int = NO_VERSION,
        prefill_tokens: int | None = None,
        keep_cache: bool = False,
        static: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model = model.eval().requires_grad_(False)
        static = model.device.type == "cuda" if static is None else static
        # A graph reads the weights at the addresses that they had when it was recorded.
        self._weights = OwnWeights(model, LARGEST_INTEGER.get(config.dtype or ""), in_place=static)
        self._precision = _precision(config.dtype, model)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._max_length = config.max_length or SLOT_TOKENS
        self._seed = seed
        self._version = initial_version
        self._keep_cache = keep_cache
        prefill = prefill_tokens or (512 if model.device.type == "cpu" else 8192)
        self._device: torch.device = model.device
        self._passes = open_passes(
            model,
            config.slots,
            self._max_length,
            prefill_tokens=prefill,
            keep_cache=keep_cache,
            routed=config.return_routed_experts,
            static=static,
        )
        self._canary = CanaryJudge()
        self._error_logger = ErrorLogger(logger)
        self._scheduler = Scheduler(config.slots, prefill, self._passes.copy, LEAST_SHARED if static else 2)
        self._waiters: list[tuple[int, Future[None]]] = []
        self._idle = IdleClock(clock)
        self._closed = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        *,
        device: str | None = None,
        **options: Any,
    ) -> Self:
        """Load the Hugging Face model that `model` names, on the GPU if there is one; `options` are further arguments
        of the class.

        Raises ConfigError: see the class; or the model's configuration cannot be used.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        source = source_of(model)
        dtype = model.dtype if config.dtype is None or config.dtype in LARGEST_INTEGER else config.dtype
        with unmeasured_work(f"loading {model.path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path, config=open_config(model), dtype=getattr(torch, dtype), **source.options
            )
        route_in_float32(loaded)
        logger.info("the engine computes on %s", described(device))
        return cls(loaded.to(device), config, **options)

    @property
    def version(self) -> int:
        return self._version

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors that a weight update must have."""
        return self._weights.shapes

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def takes_grammars(self) -> bool:
        return False

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `tokens` (see `Engine`). The turn also ends with `length` if the slot is full.

        Cancelling the call releases the session. Raises EngineError also if the session is generating already, a
        forward pass failed, or the call has a grammar or images.
        """
        self._check(tokens)
        if images:
            raise EngineError("the embedded engine takes no images: set engine.kind=sglang")
        if sampling.grammar is not None:
            raise EngineError("the embedded engine samples without grammars: set engine.kind to sglang or vllm")
        limit = min(sampling.max_new_tokens, self._max_length - len(tokens))
        key = request_key(self._seed, session)
        wanted = sampling.alternatives
        request = Request(session, tokens.copy(), sampling.temperature, limit, frozenset(stop), key, wanted)
        self._check_open()
        self._commands.put(partial(self._submit, request))
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            self._commands.put(partial(self._scheduler.cancel, request))
            raise

    def release(self, session: str) -> None:
        self._commands.put(partial(self._release, session))

    async def update_weights(self, version: int, weights: Weights, check: CanaryCheck | None = None) -> None:
        """Switch to `version` between two passes (see `Engine`). Tensors are in the published format (see
        weight_format.py).

        The caller must never change them afterwards, since the model may use them without a copy.
        """
        if check is not None:
            check.canary.check_ids(self._vocabulary)
        staged = await in_own_thread(lambda: self._weights.stage(tensors_of(weights)))
        await self._between_passes(partial(self._switch, version, staged, check))

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        """Wait for a version (see `Engine`). The engine has only one version at a time, so pinned sessions get newer
        versions, too. Raises EngineError: the engine is closed before the version arrives.
        """
        self._check_open()
        if version > self._version:
            reached: Future[None] = Future()
            self._commands.put(partial(self._wait, version, reached))
            await asyncio.wrap_future(reached)

    async def respond(self) -> None:
        """Return once the engine's thread has finished its current pass. Raises EngineError: the engine is closed."""
        await self._between_passes(lambda: None)

    def stats(self) -> EngineStats:
        return EngineStats(
            self._passes.sampled, *self._idle.read(), len(self._scheduler.running), self._canary.counters
        )

    async def close(self) -> None:
        """End the thread after the current pass; outstanding calls fail with EngineError."""
        self._closed = True
        self._commands.put(lambda: None)
        await in_own_thread(self._thread.join)

    async def _between_passes(self, call: Callable[[], None]) -> None:
        """Run `call` in the engine's thread. Raises EngineError or WeightsError: `call` raised it; EngineError: `call`
        raised any other error, which ends the engine."""
        self._check_open()
        done: Future[None] = Future()
        # An error refers to this frame. If `done` had the error, the frame and the error would refer to each other, and
        # this cycle would keep the weights in `call` until Python's next garbage collection. That may be minutes away.
        failures: list[EngineError | WeightsError] = []

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    call()
                except (EngineError, WeightsError) as error:
                    failures.append(error.with_traceback(None))
                except BaseException as error:
                    # A part of the weights may be of another version already, so the thread must end.
                    failures.append(EngineError(f"the engine ends after an unexpected error: {error!r}"))
                    raise
                finally:
                    done.set_result(None)

        self._commands.put(run)
        await asyncio.wrap_future(done)
        if failures:
            raise failures.pop()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check(self, tokens: NDArray[np.int32]) -> None:
        check_ids(tokens, self._vocabulary)
        if len(tokens) >= self._max_length:
            raise EngineError(
                f"{len(tokens)} tokens leave no room for a sampled token: engine.max_length is {self._max_length}"
            )

    # All methods below run in the engine's own thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode(), on_device(self._device):
                while not self._closed:
                    self._take_commands()
                    if self._ready:
                        self._step()
        finally:
            self._closed = True
            self._fail_outstanding()

    def _fail_outstanding(self) -> None:
        while not self._commands.empty():
            self._commands.get()()
        closed = EngineError("the engine was closed")
        self._scheduler.fail_all(closed)
        for _, waiter in self._waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(closed)

    @property
    def _ready(self) -> bool:
        return self._version != NO_VERSION and (self._scheduler.busy or self._passes.pending)

    def _take_commands(self) -> None:
        if not self._ready:
            self._idle.idle()
            command = self._commands.get()
            self._idle.busy()
            command()
        while not self._commands.empty():
            self._commands.get()()

    def _submit(self, request: Request) -> None:
        try:
            self._scheduler.submit(request)
        except EngineError as error:
            request.fail(error)

    def _release(self, session: str) -> None:
        if self._scheduler.is_running(session):
            # The request ends with all tokens that were sampled for it.
            self._advance(self._passes.settle)
        self._scheduler.release(session)

    def _wait(self, version: int, reached: Future[None]) -> None:
        self._waiters.append((version, reached))
        self._wake()

    def _wake(self) -> None:
        for version, waiter in self._waiters:
            if version <= self._version and waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        self._waiters = [(version, waiter) for version, waiter in self._waiters if version > self._version]

    def _switch(self, version: int, staged: Mapping[str, torch.Tensor], check: CanaryCheck | None) -> None:
        if version <= self._version:
            raise WeightsError(f"version {version} is not newer than {self._version}, which is served")
        # Tokens of the pass that has started belong to the old version.
        self._advance(self._passes.settle)
        replaced = self._weights.load(staged)
        self._forget()
        if check is not None:
            try:
                self._check_canary(check)
            except CanaryError:
                self._weights.load(replaced, keep=False)
                self._forget()
                raise
        self._version = version
        self._wake()

    def _forget(self) -> None:
        """Empty the cache, except for kept slots."""
        self._passes.forget(self._scheduler.forget(self._keep_cache))

    def _check_canary(self, check: CanaryCheck) -> None:
        """Raises CanaryError: the model's log-probs of the canary differ from the learner's. Before and after the
        check, the canary's slot has no tokens of a session."""
        by, tokens = "the embedded engine", check.canary.tokens[: self._max_length]
        try:
            answer = self._passes.logprobs(tokens)
        except Exception as error:
            self._error_logger.exception("the canary could not be computed", error)
            raise self._canary.refuse(check, by, repr(error)) from error
        self._canary.judge(check, answer, self._precision, by, len(tokens))

    def _step(self) -> None:
        self._advance(lambda: self._passes.compute(self._scheduler.plan()))

    def _advance(self, compute: Callable[[], list[SampledTokens]]) -> None:
        """Add the tokens that `compute` returns to their requests. If it fails, the running requests fail."""
        try:
            self._append(compute())
        except Exception as error:
            failed = EngineError(f"a forward pass failed: {error!r}")
            self._error_logger.exception(f"requests end with an error: {failed}", error)
            self._scheduler.fail_all(failed, waiting=False)

    def _append(self, sampled: Sequence[SampledTokens]) -> None:
        for slot, tokens, logprobs, alternatives in sampled:
            if math.isfinite(logprobs[-1]):
                self._scheduler.append(slot, tokens, logprobs, self._version, alternatives)
            else:
                error = EngineError(f"version {self._version} gives logits that are not finite")
                self._scheduler.fail(slot.request, error)


def _precision(dtype: str | None, model: Any) -> str:
    """The precision of the engine, a key of `weights.canary.TOLERANCES`."""
    if dtype in LARGEST_INTEGER:
        return INT4 if dtype == INT4 else QUANTIZED
    return dtype_name(model.dtype)
