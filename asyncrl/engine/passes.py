"""The forward passes of the embedded engine: they write keys and values into the slots of a cache, and sample tokens.

Only the engine's own thread may use `Passes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.cache import Layout, SlotCache, use_slot_attention
from asyncrl.engine.router_watch import RouterWatch
from asyncrl.engine.sampling import most_likely, sample, uniforms
from asyncrl.engine.scheduler import Slot, SlotChunk


class SampledTokens(NamedTuple):
    """Consecutive tokens that passes sampled for the sequence in `slot`, with their log-probs.

    `alternatives` has the most likely tokens and their log-probs for each sampled token, if the request wants them.
    If logits were not finite, the last log-prob is not finite either, and the slot was wiped.
    """

    slot: Slot
    tokens: list[int]
    logprobs: list[float]
    alternatives: Sequence[tuple[list[int], list[float]]]


class Passes:
    """Passes of `model` over sequences in `slots` slots of `length` tokens. The model's attention is replaced.

    - With `keep_cache`, slots stay in use when the weights change.
    - With `routed`, slots get the experts of their tokens.

    Raises ConfigError: the model has fewer than `length` positions, its attention does not fit a slot cache, or it has
    no experts that can be returned.
    """

    def __init__(self, model: Any, slots: int, length: int, *, keep_cache: bool, routed: bool) -> None:
        self._model = model
        self._device: torch.device = model.device
        # The canary needs an empty slot: slot 0 if a switch empties the cache, and an extra slot if it does not.
        self._canary_slot = slots if keep_cache else 0
        shape = model.config.get_text_config()
        self._cache = SlotCache(shape, slots + keep_cache, length, model.dtype, model.device)
        use_slot_attention(model, self._cache)
        self._routers = RouterWatch(model) if routed else None
        # For each slot: the number of tokens whose keys and values may be nan, since they have not led to a finite
        # log-prob yet.
        self._unproven: dict[int, int] = {}
        self.sampled = 0
        """The number of tokens that were sampled from finite logits."""

    @property
    def pending(self) -> bool:
        """Always false: each call of `compute` returns the tokens of its own pass."""
        return False

    def settle(self) -> list[SampledTokens]:
        """Return no tokens: see `pending`."""
        return []

    def copy(self, source: int, slot: int, count: int) -> None:
        """Copy the keys and values of the first `count` tokens from slot `source` into `slot`."""
        self._cache.copy(source, slot, count)

    def compute(self, work: Sequence[tuple[Slot, SlotChunk]]) -> list[SampledTokens]:
        """Compute one pass over the chunks, and sample a token for each sequence whose chunk reaches the sequence's
        end."""
        complete = [index for index, (slot, chunk) in enumerate(work) if chunk.end == len(slot.tokens)]
        for slot, chunk in work:
            self._unproven[slot.index] = max(self._unproven.get(slot.index, 0), chunk.end)
        tokens, logprobs, alternatives = self._forward(work, complete)
        self._note_experts(work)
        for slot, chunk in work:
            slot.cached = chunk.end
        for index, logprob in zip(complete, logprobs, strict=True):
            slot, chunk = work[index]
            if not math.isfinite(logprob):
                self._cache.wipe(slot.index)
                del self._unproven[slot.index]
            elif self._unproven[slot.index] <= chunk.end:
                del self._unproven[slot.index]
        self.sampled += sum(map(math.isfinite, logprobs))
        slots = [work[index][0] for index in complete]
        found = zip(slots, tokens, logprobs, alternatives, strict=True)
        return [SampledTokens(slot, [token], [logprob], [others]) for slot, token, logprob, others in found]

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute the log-probs float32[T - 1] of the T `tokens` after the first one, in the slot of the canary. The
        slot must be empty; the next `forget` wipes it."""
        self._unproven[self._canary_slot] = len(tokens)
        layout = Layout(self._cache, [SlotChunk(self._canary_slot, 0, len(tokens))])
        ids = torch.tensor(tokens, device=self._device)
        logits = self._model(ids[None], position_ids=layout.positions, use_cache=False, layout=layout).logits[0]
        logprobs = logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found: NDArray[np.float32] = logprobs.cpu().numpy()
        return found

    def forget(self, kept: Collection[int]) -> None:
        """Wipe all slots that may have a nan, except for the `kept` slots."""
        # A nan that stays in a slot would spoil later results, even if its position is masked.
        for index in self._unproven.keys() - kept:
            self._cache.wipe(index)
            del self._unproven[index]

    def _note_experts(self, work: Sequence[tuple[Slot, SlotChunk]]) -> None:
        """Note in each slot the experts of those tokens that the last pass computed for the first time."""
        if self._routers is None:
            return
        rows, begin = self._routers.take(), 0
        for slot, chunk in work:
            end = begin + chunk.end - chunk.start
            slot.experts += rows[begin + len(slot.experts) - chunk.start : end]
            begin = end

    def _forward(
        self, work: Sequence[tuple[Slot, SlotChunk]], complete: Sequence[int]
    ) -> tuple[list[int], list[float], list[tuple[list[int], list[float]]]]:
        """Compute one pass over `work`. For each chunk in `complete`, return a sampled token, its log-prob and its
        alternatives. `complete` has the indices of the chunks that reach the ends of their sequences.
        """
        layout = Layout(self._cache, [chunk for _, chunk in work])
        if self._routers is not None:
            self._routers.take()
        ids = [token for slot, chunk in work for token in slot.tokens[chunk.start : chunk.end]]
        logits = self._model(
            input_ids=torch.tensor(ids, device=self._device)[None],
            position_ids=layout.positions,
            use_cache=False,
            logits_to_keep=torch.from_numpy(layout.last[complete]).to(self._device),
            layout=layout,
        ).logits[0]
        slots = [work[index][0] for index in complete]
        temperature = torch.tensor([slot.request.temperature for slot in slots], device=self._device)
        noise = uniforms([slot.request.key for slot in slots], [len(slot.tokens) for slot in slots])
        tokens, logprobs = sample(logits, temperature, torch.from_numpy(noise).to(self._device))
        wanted = max((slot.request.wanted for slot in slots), default=0)
        if not wanted:
            return tokens.tolist(), logprobs.tolist(), [([], [])] * len(slots)
        likeliest = (each.tolist() for each in most_likely(logits, temperature, wanted))
        return tokens.tolist(), logprobs.tolist(), list(zip(*likeliest, strict=True))
