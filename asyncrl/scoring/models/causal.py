"""Causal language models as step scorers: a backbone that is read at chosen positions, and the model made of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.modelling.attention import longest_plain
from asyncrl.scoring.models.architecture import longest_input
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.batching import micro_batches, pass_cost, share_prefixes
from asyncrl.scoring.models.encoding import Encode, Encoded, LengthLimit, encode_within
from asyncrl.scoring.transcript import Transcript

Readout = Callable[[Tensor, Tensor], Tensor]
"""Final hidden states [R, H] and the id of the token that follows each int64[R], to one number a row [R]."""


class CausalReader:
    """A causal backbone, read at chosen positions.

    `micro_tokens` bounds the tokens of one forward pass, padding and shared prefix included. In float32 what is read
    does not depend on what else is in the batch, up to rounding.
    """

    def __init__(self, backbone: Any, readout: Readout, micro_tokens: int) -> None:
        self.backbone = backbone.eval()
        self._readout = readout
        # A longer input beside it would encode an input's positions otherwise.
        alone = longest_plain(backbone.config) < sys.maxsize
        # No bound is as low as 0: every input is a batch of its own.
        self._micro_tokens = 0 if alone else micro_tokens
        self.pass_cost = pass_cost(backbone.device.type)
        self.shares_prefixes = _remembers_by_attention(backbone.config) and not alone

    @property
    def max_tokens(self) -> int:
        """The longest input that the backbone was made for."""
        return longest_input(self.backbone)

    @torch.inference_mode()
    def read(self, inputs: Sequence[Encoded]) -> list[NDArray[np.float64]]:
        """float64[K] an input: the sum of what is read at each of its K steps' positions."""
        totals = [np.zeros(len(each.reads)) for each in inputs]
        used = [index for index, each in enumerate(inputs) if any(each.reads)]
        # What follows the last read changes nothing, for the backbone is causal.
        ends = {index: max(chain.from_iterable(inputs[index].reads)) + 1 for index in used}
        for prefix, positions in self._shared([inputs[index] for index in used]):
            members = [used[position] for position in positions]
            past = self._run([inputs[members[0]].ids[:prefix]], use_cache=True).past_key_values if prefix else None
            for batch in micro_batches([ends[index] for index in members], self._micro_tokens, self.pass_cost):
                chosen = [members[position] for position in batch]
                found = self._read([inputs[i] for i in chosen], [ends[i] for i in chosen], prefix, past)
                for index, sums in zip(chosen, found, strict=True):
                    totals[index] = sums
        return totals

    def _shared(self, inputs: Sequence[Encoded]) -> list[tuple[int, list[int]]]:
        if not self.shares_prefixes:
            return [(0, list(range(len(inputs))))]
        before = [each.ids[: min(chain.from_iterable(each.reads))] for each in inputs]
        return share_prefixes(before, self.pass_cost)

    def _read(
        self, inputs: Sequence[Encoded], ends: Sequence[int], prefix: int, past: Any
    ) -> list[NDArray[np.float64]]:
        if prefix:
            past = copy.deepcopy(past)
            past.batch_repeat_interleave(len(inputs))
        ids = [each.ids[prefix:end] for each, end in zip(inputs, ends, strict=True)]
        hidden = self._run(ids, past, use_cache=prefix > 0).last_hidden_state
        where = [(row, at) for row, each in enumerate(inputs) for at in chain.from_iterable(each.reads)]
        rows = torch.tensor([row for row, _ in where], device=hidden.device)
        columns = torch.tensor([at - prefix for _, at in where], device=hidden.device)
        following = torch.tensor([_following(inputs[row].ids, at) for row, at in where], device=hidden.device)
        values = self._readout(hidden[rows, columns], following).double().cpu().numpy()
        return _sum_by_step(values, inputs)

    def _run(self, ids: Sequence[Sequence[int]], past: Any = None, *, use_cache: bool) -> Any:
        longest = max(len(each) for each in ids)
        padded = [[*each, *[0] * (longest - len(each))] for each in ids]
        tokens = torch.tensor(padded, device=self.backbone.device)
        # No attention mask: the backbone is causal, so that nothing sees the padding on the right.
        return self.backbone(input_ids=tokens, past_key_values=past, use_cache=use_cache)


def _remembers_by_attention(config: Any) -> bool:
    """Whether its cache of a prefix can be handed to several inputs: recurrent layers keep another kind of state."""
    layers = set(getattr(config, "layer_types", None) or ())
    return hasattr(config, "num_attention_heads") and layers <= {"full_attention", "sliding_attention"}


def _following(ids: Sequence[int], position: int) -> int:
    return ids[position + 1] if position + 1 < len(ids) else 0


def _sum_by_step(values: NDArray[np.float64], inputs: Sequence[Encoded]) -> list[NDArray[np.float64]]:
    """Flat values, in the order of inputs, steps and reads, to the sum of each step."""
    found, position = [], 0
    for each in inputs:
        bounds = [position, *(position + count for count in accumulate(len(reads) for reads in each.reads))]
        found.append(np.array([values[start:end].sum() for start, end in pairwise(bounds)]))
        position = bounds[-1]
    return found


class CausalPRM:
    """A process reward model whose step logits are read off one causal backbone; the families make it."""

    def __init__(self, name: str, encode: Encode, reader: CausalReader, drop_oldest: bool = False) -> None:
        self._name = name
        self._encode = encode
        self._reader = reader
        self._limit = LengthLimit(reader.max_tokens, drop_oldest, name)

    @property
    def name(self) -> str:
        return self._name

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """See ProcessRewardModel."""
        inputs = [encode_within(transcript, self._encode, self._limit) for transcript in transcripts]
        return [StepScores.of_logits(logits) for logits in self._reader.read(inputs)]


def linear(weight: Tensor, bias: Tensor | None = None) -> Readout:
    """weight [H] and bias [] as a readout, in float32."""
    weight, offset = weight.float(), 0.0 if bias is None else bias.float()
    return lambda hidden, _: hidden.float() @ weight + offset
