"""Scores steps with causal language models. A reader computes values at chosen positions of an input. A process reward
model sums the values of its readers, each with a weight."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import ScoringError
from asyncrl.modelling.attention import longest_plain
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.batching import micro_batches, pass_cost, share_prefixes
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode, Encoded, embedding_rows, longest_input
from asyncrl.scoring.transcript import Transcript

Readout = Callable[[Tensor, Tensor], Tensor]
"""Maps final hidden states [R, H] and the ids of the next tokens int64[R] to one number for each row, [R]."""
LabelTokens = tuple[int, int]
"""The ids of two tokens: the label for a good step, and the label for a bad step."""


class CausalReader:
    """A causal backbone (a language model without its head) with a readout, which maps its hidden states to values.

    `micro_tokens` bounds the tokens of one forward pass, padding and shared prefix included. `micro_inputs` bounds the
    inputs of a pass (None: no limit). In float32 a value does not depend on the rest of the batch, up to rounding.
    """

    def __init__(
        self,
        backbone: Any,
        readout: Readout,
        micro_tokens: int,
        share: bool = True,
        micro_inputs: int | None = None,
    ) -> None:
        self._backbone = backbone.eval()
        self._readout = readout
        # Some models encode the positions of all inputs of a pass differently once one of the inputs is longer than a
        # limit. Then each input is computed alone.
        alone = longest_plain(backbone.config) < sys.maxsize
        # With a limit of 0 tokens, every input becomes a batch of its own.
        self._micro_tokens = 0 if alone else micro_tokens
        self._micro_inputs = micro_inputs
        self._share = share and not alone and _caches_attention_only(backbone.config)
        self.pass_cost = pass_cost(backbone.device.type)

    @property
    def max_tokens(self) -> int:
        """The longest input that the backbone was made for."""
        return longest_input(self._backbone)

    @property
    def rows(self) -> int:
        """The number of token ids in the backbone's embedding."""
        return embedding_rows(self._backbone)

    @torch.inference_mode()
    def read(self, inputs: Sequence[Encoded]) -> list[NDArray[np.float64]]:
        """One array float64[K] for each input. For each of the input's K steps, it has the sum of the values at the
        step's positions."""
        totals = [np.zeros(len(each.reads)) for each in inputs]
        used = [index for index, each in enumerate(inputs) if any(each.reads)]
        # The backbone is causal, so tokens after the last position that is read change nothing, and are left out.
        ends = {index: max(chain.from_iterable(inputs[index].reads)) + 1 for index in used}
        prefixes = [(0, list(range(len(used))))]
        if self._share:
            before = [inputs[index].ids[: min(chain.from_iterable(inputs[index].reads))] for index in used]
            prefixes = share_prefixes(before, self.pass_cost)
        for prefix, positions in prefixes:
            members = [used[position] for position in positions]
            past = self._run([inputs[members[0]].ids[:prefix]], use_cache=True).past_key_values if prefix else None
            lengths = [ends[index] for index in members]
            for batch in micro_batches(lengths, self._micro_tokens, self.pass_cost, self._micro_inputs):
                chosen = [members[position] for position in batch]
                values = self._read([inputs[i] for i in chosen], [ends[i] for i in chosen], prefix, past)
                for index, sums in zip(chosen, values, strict=True):
                    totals[index] = sums
        return totals

    def _read(
        self, inputs: Sequence[Encoded], ends: Sequence[int], prefix: int, past: Any
    ) -> list[NDArray[np.float64]]:
        if prefix:
            past = copy.deepcopy(past)
            past.batch_repeat_interleave(len(inputs))
        ids = [each.ids[prefix:end] for each, end in zip(inputs, ends, strict=True)]
        hidden = self._run(ids, past, use_cache=prefix > 0).last_hidden_state
        where = [
            (row, step, at - prefix, each.ids[at + 1] if at + 1 < len(each.ids) else 0)
            for row, each in enumerate(inputs)
            for step, reads in enumerate(each.reads)
            for at in reads
        ]
        rows, _, columns, following = torch.tensor(where, device=hidden.device).T
        values = self._readout(hidden[rows, columns], following).double().cpu().tolist()
        sums = [np.zeros(len(each.reads)) for each in inputs]
        for (row, step, _, _), value in zip(where, values, strict=True):
            sums[row][step] += value
        return sums

    def _run(self, ids: Sequence[Sequence[int]], past: Any = None, *, use_cache: bool) -> Any:
        longest = max(len(each) for each in ids)
        padded = [[*each, *[0] * (longest - len(each))] for each in ids]
        tokens = torch.tensor(padded, device=self._backbone.device)
        # An attention mask is not needed: in a causal backbone no token sees the padding on its right.
        return self._backbone(input_ids=tokens, past_key_values=past, use_cache=use_cache)


def _caches_attention_only(config: Any) -> bool:
    """True if several inputs can continue a cached prefix, which needs a model with attention layers only."""
    # Several inputs cannot continue the state of recurrent layers in this way.
    layers = set(getattr(config, "layer_types", None) or ())
    return hasattr(config, "num_attention_heads") and layers <= {"full_attention", "sliding_attention"}


class CausalPRM:
    """A process reward model whose step logits are the weighted sum of the values of its readers.

    The `load` of every local family returns a CausalPRM. Raises ConfigError: see `Checkpoint.encoder`."""

    def __init__(self, checkpoint: Checkpoint, encode: Encode, readers: Mapping[CausalReader, float]) -> None:
        self.name = checkpoint.name
        self.readers = readers
        self._longest = min(reader.max_tokens for reader in readers)
        self._rows = min(reader.rows for reader in readers)
        self._encoder = checkpoint.encoder(encode, self._longest, self._rows)

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """See RewardModel."""
        return self._scores(list(map(self._encoder, transcripts)))

    def score_tokens(self, texts: Sequence[Sequence[int]]) -> list[StepScores]:
        """A score for each token of texts, which are given as the model's own token ids.

        Raises ScoringError: a text is too long, or has a token beyond the embedding.
        """
        for number, ids in enumerate(texts):
            if len(ids) > self._longest or max(ids, default=0) >= self._rows:
                raise ScoringError(
                    f"{self.name} reads up to {self._longest} tokens with ids below {self._rows}; text {number} has "
                    f"{len(ids)} tokens with ids up to {max(ids, default=0)}"
                )
        return self._scores([Encoded(ids, [[at] for at in range(len(ids))]) for ids in texts])

    def _scores(self, inputs: Sequence[Encoded]) -> list[StepScores]:
        parts = [[weight * values for values in reader.read(inputs)] for reader, weight in self.readers.items()]
        return [StepScores.of_logits(sum(values)) for values in zip(*parts, strict=True)]


def linear(weight: Tensor, bias: Tensor | None = None) -> Readout:
    """weight [H] and bias [] as a readout, in float32, on the weight's device."""
    weight, offset = weight.float(), 0.0 if bias is None else bias.float()
    return lambda hidden, _: hidden.to(weight.device).float() @ weight + offset


def label_prm(checkpoint: Checkpoint, read_with: Callable[[Any], tuple[Encode, LabelTokens]]) -> CausalPRM:
    """A causal language model that judges a step by the next token: the good label's logit minus the bad label's.

    `read_with(tokenizer)` gives the encoding and the label tokens. Raises ConfigError: the model cannot be loaded, or
    lacks a label token.
    """
    model = checkpoint.language_model()
    encode, (good, bad) = read_with(checkpoint.tokenizer())
    head = model.get_output_embeddings()
    checkpoint.require_rows((good, bad), len(head.weight))
    weight = head.weight[good].float() - head.weight[bad].float()
    bias = getattr(head, "bias", None)
    offset = None if bias is None else (bias[good].float() - bias[bad].float()).detach()
    readout = linear(weight.detach(), offset)
    reader = CausalReader(model.base_model, readout, checkpoint.micro_tokens, micro_inputs=checkpoint.micro_inputs)
    return CausalPRM(checkpoint, encode, {reader: 1.0})
