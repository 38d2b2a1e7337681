"""The passes of the embedded engine as CUDA graphs: a pass starts before the host has read the tokens of the last one.

Invariants:

- Once its prompt is computed, a sequence decodes in every pass, until its request has ended or its limit is reached.
  Its next token reaches the model on the device, so the host need not know the token.
- Each call of `compute` starts a pass and reads the tokens of the pass before. So a sequence may be computed one token
  further than its stop token. This token is dropped.
- `compute` returns the tokens of a sequence once its request ends (see unread.py). `settle` returns all tokens that
  were not returned before.
- All work of the device is in one stream. So a slot may get a new sequence while a pass still computes the old one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.cache import Layout, SlotCache, use_slot_attention
from asyncrl.engine.graphed.attention import Attention, attend_over_slots
from asyncrl.engine.graphed.capture import NoGraphError, RefuseWaiting, capture
from asyncrl.engine.graphed.decoding import Decoding
from asyncrl.engine.graphed.inputs import PassInputs, PassRows, PassShape, PassTokens, pass_shapes
from asyncrl.engine.graphed.norms import fuse_norms
from asyncrl.engine.graphed.static_pass import StaticPass, StaticTensors
from asyncrl.engine.graphed.unread import UnreadTokens
from asyncrl.engine.passes import SampledTokens
from asyncrl.engine.sampling import most_likely, uniforms
from asyncrl.engine.scheduler import Slot, SlotChunk
from asyncrl.modelling.attention import check_same_logits
from asyncrl.modelling.devices import on_device
from asyncrl.weights.canary import LENGTH as CANARY_LENGTH

_TRIAL = 8
_CPU_TILES = 1, 4
_NO_ROWS = np.zeros(0, np.int64)
_NO_NUMBERS = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class _HostSide:
    """The host's memory for the inputs of a pass, their `parts`, and the results. On a GPU it is pinned, so that copies
    need not wait."""

    inputs: torch.Tensor
    parts: PassInputs
    results: torch.Tensor

    @classmethod
    def of(cls, tensors: StaticTensors, shapes: Sequence[PassShape]) -> list[_HostSide]:
        """Make one object for each shape, all in the same memory."""
        inputs, results = (
            torch.zeros_like(each, device="cpu", pin_memory=each.device.type == "cuda")
            for each in (tensors.inputs, tensors.results)
        )
        return [
            cls(inputs[: each.numbers], PassInputs.of_array(inputs.numpy(), each), results[: each.rows])
            for each in shapes
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    """A pass that has started: the sequences of its rows, its results on the host, and the alternatives.

    `done` waits until the results are there.
    """

    rows: Decoding
    results: torch.Tensor
    alternatives: tuple[torch.Tensor, torch.Tensor] | None
    done: Callable[[], None]


class GraphedPasses:
    """Passes of `model` over sequences in `slots` slots of `length` tokens. The model's attention is replaced.

    A pass has at most `prefill_tokens` tokens of prompts, not counting sequences that lack a single token. On a GPU,
    passes of several sizes are recorded as CUDA graphs at the start. So the model's tensors must keep their memory.

    Raises ConfigError: see `Passes`. Raises NoGraphError: the model's passes cannot be recorded.
    """

    def __init__(self, model: Any, slots: int, length: int, prefill_tokens: int) -> None:
        self._device: torch.device = model.device
        self._model = model
        # One more slot for the canary, and one for the padding.
        self._canary_slot, self._padding = slots, slots + 1
        shape = model.config.get_text_config()
        self._cache = SlotCache(shape, slots + 2, length, model.dtype, model.device)
        fuse_norms(model)
        use_slot_attention(model, self._cache)
        tile_tokens, attention = _attention(self._cache)
        self._most_rows = max(slots, CANARY_LENGTH)
        largest = max(slots + prefill_tokens, CANARY_LENGTH)
        self._shapes = pass_shapes(largest, slots, self._most_rows, tile_tokens)
        self._sizes = [each.tokens for each in self._shapes]
        self._tensors = StaticTensors.of(self._shapes[-1], slots + 2, shape.vocab_size, model.dtype, model.device)
        # There are two: the host reads the results of a pass after the next pass has started.
        self._host = [_HostSide.of(self._tensors, self._shapes) for _ in range(2)]
        self._turn = 0
        self._decoding = Decoding.after([])
        self._unread = UnreadTokens(slots)
        self.sampled = 0
        """The number of tokens that were sampled from finite logits."""
        self._started: _Started | None = None
        self._passes = [StaticPass(model, self._cache, self._tensors, each, attention) for each in self._shapes]
        self._runs: list[Callable[[], None]] = [each.run for each in self._passes]
        with torch.inference_mode(), on_device(self._device):
            self._check()
            if self._device.type == "cuda":
                self._runs = self._record()

    @property
    def pending(self) -> bool:
        """True if a pass has started, and no call has read its tokens yet."""
        return self._started is not None

    def copy(self, source: int, slot: int, count: int) -> None:
        """Copy the keys and values of the first `count` tokens from slot `source` into `slot`."""
        self._cache.copy(source, slot, count)

    def compute(self, work: Sequence[tuple[Slot, SlotChunk]]) -> list[SampledTokens]:
        """Start a pass over the chunks and the next token of each decoding sequence. Read the tokens of the pass
        before, and return the tokens of the sequences whose requests end."""
        earlier, self._started = self._started, None
        try:
            self._started = self._start(work)
        finally:
            # This waits for the earlier pass even after an error. Otherwise a later pass could overwrite the earlier
            # pass's inputs before the device has read them.
            found = [] if earlier is None else self._read(earlier)
        return found

    def settle(self) -> list[SampledTokens]:
        """Wait for the pass that has started, and return all tokens that no call has returned."""
        earlier, self._started = self._started, None
        ended = [] if earlier is None else self._read(earlier)
        due = {each.slot.index for each in ended}
        slots = [slot for slot in compress(self._decoding.slots, self._decoding.present) if slot.index not in due]
        return [*ended, *filter(None, map(self._unread.hand_out, slots))]

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute the log-probs float32[T - 1] of the T `tokens` after the first one, in the slot of the canary. No
        pass may be pending."""
        logits = self._logits_of(tokens, self._most_rows)
        targets = torch.tensor(tokens[1:], device=self._device)
        logprobs = logits[:-1].float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        found: NDArray[np.float32] = logprobs.cpu().numpy()
        return found

    def forget(self, kept: Collection[int]) -> None:
        """Do nothing: no token reads beyond its own sequence, so nothing has to be wiped."""

    def _start(self, work: Sequence[tuple[Slot, SlotChunk]]) -> _Started | None:
        going_on = self._decoding = self._decoding.going_on()
        if not going_on and not work:
            return None
        tokens = PassTokens(
            going_on.indices,
            going_on.lengths,
            [chunk for _, chunk in work],
            [slot.tokens[chunk.start : chunk.end] for slot, chunk in work],
        )
        complete = [chunk.end == len(slot.tokens) for slot, chunk in work]
        last = tokens.ends()[np.array([True] * len(going_on) + complete, np.bool_)]
        begun = [slot for slot, _ in compress(work, complete)]
        for slot, chunk in work:
            slot.cached = chunk.end
        for slot in begun:
            slot.is_decoding = True
            self._unread.begin(slot)
        rows = self._decoding = going_on.one_further() + Decoding.after(begun)
        noise = uniforms(rows.keys, rows.lengths)
        results = self._launch(tokens, PassRows(last, rows.indices, noise, rows.temperatures))
        wanted = max((request.wanted for request in rows.requests), default=0)
        alternatives = self._most_likely(rows.temperatures, wanted) if wanted else None
        return _Started(rows, results, alternatives, self._mark())

    def _launch(self, tokens: PassTokens, rows: PassRows) -> torch.Tensor:
        """Start a pass. Returns its results on the host, which are valid once the device has computed the pass."""
        index = bisect_left(self._sizes, tokens.count)
        self._turn = 1 - self._turn
        self._fill(index, tokens, rows)
        self._runs[index]()
        results = self._host[self._turn][index].results
        return results.copy_(self._passes[index].results, non_blocking=True)

    def _fill(self, index: int, tokens: PassTokens, rows: PassRows) -> None:
        """Write the inputs of a pass with the shape number `index`."""
        host = self._host[self._turn][index]
        tokens.write(host.parts, self._shapes[index].tile_tokens, self._padding)
        rows.write(host.parts, self._padding)
        self._passes[index].inputs.copy_(host.inputs, non_blocking=True)

    def _mark(self) -> Callable[[], None]:
        """Mark this point of the device's work. The returned function waits until the device has reached it."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize

    def _read(self, started: _Started) -> list[SampledTokens]:
        """Wait for the results, and leave out those of requests that have ended. Return the tokens of the sequences
        that are due, and of those that want alternatives."""
        started.done()
        rows, present = started.rows, started.rows.present
        results = started.results.numpy()[: len(rows)][present]
        slots = list(compress(rows.slots, present))
        logprobs = np.ascontiguousarray(results[:, 1]).view(np.float64)
        self.sampled += int(np.isfinite(logprobs).sum())
        due = self._unread.add(rows.indices[present], results[:, 0], logprobs)
        pairs: Sequence[tuple[list[int], list[float]]] = ()
        if started.alternatives is not None:
            pairs = list(zip(*(compress(each.tolist(), present) for each in started.alternatives), strict=True))
            due = sorted({*due, *(place for place, slot in enumerate(slots) if slot.request.wanted)})
        found = (self._unread.hand_out(slots[place], pairs[place : place + 1]) for place in due)
        return list(filter(None, found))

    def _most_likely(self, temperatures: NDArray[np.float64], wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._tensors.logits[: len(temperatures)]
        # In float64, as the temperatures are, log-probs would differ from those of `sample`.
        scales = torch.from_numpy(temperatures).to(self._device, torch.float32)
        tokens, logprobs = most_likely(logits, scales, wanted)
        return tokens.cpu(), logprobs.cpu()

    def _logits_of(self, tokens: Sequence[int], most: int) -> torch.Tensor:
        """Compute the logits [T, V] of T tokens in the slot of the canary, by chunks of at most `most` tokens."""
        slot, parts = self._canary_slot, []
        for start in range(0, len(tokens), most):
            text = tokens[start : start + most]
            count = len(text)
            chunk = SlotChunk(slot, start, start + count)
            self._launch(
                PassTokens(_NO_ROWS, _NO_ROWS, [chunk], [text]),
                PassRows(np.arange(count), np.full(count, slot), np.full(count, 0.5), np.zeros(count)),
            )
            parts.append(self._tensors.logits[:count].clone())
            # Wait, since a later launch uses the host's memory again.
            self._mark()()
        return torch.cat(parts)

    def _check(self) -> None:
        """Raises NoGraphError: the host has to wait for the device within a pass, or the log-probs of a static pass
        differ from those of a usual one."""
        ids = torch.arange(min(_TRIAL, self._cache.length), device=self._device) * 7 % self._tensors.logits.shape[1]
        layout, tokens = Layout(self._cache, [SlotChunk(0, 0, len(ids))]), ids.tolist()
        usual = self._model(ids[None], position_ids=layout.positions, use_cache=False, layout=layout).logits[0]
        try:
            with RefuseWaiting():
                ours = self._logits_of(tokens, 3)
            check_same_logits(usual, ours, self._model.dtype, "its log-probs change in a static pass")
        except NoGraphError:
            raise
        # Any error is possible: the model's code may not allow a static pass, or the kernel may need more than this GPU
        # has. The usual passes may still work.
        except Exception as error:
            raise NoGraphError(f"a static pass failed ({type(error).__name__}: {error})") from error

    def _record(self) -> list[Callable[[], None]]:
        """Record the passes as graphs, the largest first, so that the others can use the memory of the largest. Raises
        NoGraphError: torch cannot record them."""
        pool, stream, graphs = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), []
        try:
            for index, each in reversed(list(enumerate(self._passes))):
                self._fill(
                    index,
                    PassTokens(_NO_ROWS, _NO_ROWS, [], []),
                    PassRows(_NO_ROWS, _NO_ROWS, _NO_NUMBERS, _NO_NUMBERS),
                )
                each.run()
                graphs.append(capture(each.run, pool, stream))
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise NoGraphError(f"torch cannot record a pass ({error})") from error
        torch.cuda.empty_cache()
        return graphs[::-1]


def _attention(cache: SlotCache) -> tuple[tuple[int, int], Attention]:
    """The numbers of tokens of a tile (see `pass_shapes`), and the attention for the device of the cache. Raises
    NoGraphError: there is none."""
    keys = cache.keys[0]
    if keys.device.type != "cuda":
        return _CPU_TILES, attend_over_slots
    try:
        from asyncrl.engine.graphed import kernel
    except ImportError as error:
        raise NoGraphError(f"the package triton is missing ({error})") from error
    if not kernel.supports(keys.shape[3]):
        raise NoGraphError(f"its attention heads are {keys.shape[3]} wide")
    return kernel.tile_tokens(cache.groups), kernel.attend
