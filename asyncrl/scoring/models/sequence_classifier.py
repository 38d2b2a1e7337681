"""Any AutoModelForSequenceClassification as an outcome model: one score for a whole episode.

The folder holds the model with its tokenizer. With a chat template the input is the problem as the user and the whole
response as the assistant, otherwise the two with a newline between them. A model with one label scores by its logit, a
model with more by the probability of `label`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.scoring.models.architecture import classifies_padded, longest_input
from asyncrl.scoring.models.batching import micro_batches, pass_cost
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import (
    Encode,
    Encoded,
    LengthLimit,
    chat_frame,
    encode_within,
    problem_and_steps,
    words,
)
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params:
    """`label` is the good one of several."""

    label: int = 1


class SequenceClassifier:
    """The model; see `load`."""

    def __init__(self, name: str, model: Any, encode: Encode, label: int, micro_tokens: int, drop_oldest: bool) -> None:
        self._name = name
        self._model = model
        self._encode = encode
        self._label = label
        # No bound is as low as 0: every input is a batch of its own.
        self._micro_tokens = micro_tokens if classifies_padded(model) else 0
        self._limit = LengthLimit(longest_input(model), drop_oldest, name)

    @property
    def name(self) -> str:
        return self._name

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        """See OutcomeModel."""
        ids = [encode_within(transcript, self._encode, self._limit).ids for transcript in transcripts]
        scores = [0.0] * len(ids)
        cost = pass_cost(self._model.device.type)
        for batch in micro_batches([len(each) for each in ids], self._micro_tokens, cost):
            for index, score in zip(batch, self._forward([ids[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    @torch.inference_mode()
    def _forward(self, ids: Sequence[Sequence[int]]) -> list[float]:
        logits = (self._together(ids) if len(ids) > 1 else self._model(input_ids=self._tensor(ids))).logits.float()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self._label]
        return [float(score) for score in scores.cpu()]

    def _together(self, ids: Sequence[Sequence[int]]) -> Any:
        """Several inputs in one pass. Models that read the last token find it by what is not padding; where one names
        none, and reads an input alone to its end, the padding is a token that no input has."""
        config, longest = self._model.config.get_text_config(), max(len(each) for each in ids)
        own, vocabulary = config.pad_token_id, self._model.get_input_embeddings().num_embeddings
        named = own is not None and 0 <= own < vocabulary
        filler = own if named else min(set(range(vocabulary)).difference(*ids))
        mask = self._tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
        config.pad_token_id = filler
        try:
            padded = self._tensor([[*each, *[filler] * (longest - len(each))] for each in ids])
            return self._model(input_ids=padded, attention_mask=mask)
        finally:
            config.pad_token_id = own

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self._model.device)


def load(config: ScoringModelConfig, params: Params, key: str) -> SequenceClassifier:
    """The model in the folder. Raises ConfigError: it has no such label."""
    checkpoint = Checkpoint(config, key)
    model, tokenizer = checkpoint.model("AutoModelForSequenceClassification"), checkpoint.tokenizer()
    labels = model.config.num_labels
    if labels > 1 and not 0 <= params.label < labels:
        raise ConfigError(f"{key}.params.label={params.label}: the model has the labels 0 to {labels - 1}")
    encode = encoder(tokenizer, key)
    drop_oldest = config.long_inputs == "drop_oldest"
    return SequenceClassifier(checkpoint.name, model, encode, params.label, config.micro_tokens, drop_oldest)


def encoder(tokenizer: Any, key: str) -> Encode:
    """How an episode becomes the model's input."""
    if not getattr(tokenizer, "chat_template", None):
        return lambda transcript: Encoded(tokenizer.encode("\n".join(_said(transcript)), split_special_tokens=True), [])
    before, between, after = chat_frame(tokenizer, ["user", "assistant"], key)

    def encode(transcript: Transcript) -> Encoded:
        problem, response = _said(transcript)
        return Encoded([*before, *words(tokenizer, problem), *between, *words(tokenizer, response), *after], [])

    return encode


def _said(transcript: Transcript) -> tuple[str, str]:
    problem, steps = problem_and_steps(transcript)
    return problem, "\n".join(steps)
