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

from asyncrl.errors import ConfigError
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
        self._own_filler: int | None = model.config.pad_token_id
        self._encode = encode
        self._label = label
        self._micro_tokens = micro_tokens
        self._limit = LengthLimit(int(model.config.max_position_embeddings), drop_oldest, name)

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
        longest, filler = max(len(each) for each in ids), self._filler(ids)
        self._model.config.pad_token_id = filler
        tokens = torch.tensor([[*each, *[filler] * (longest - len(each))] for each in ids], device=self._model.device)
        lengths = torch.tensor([len(each) for each in ids], device=self._model.device)
        mask = torch.arange(longest, device=self._model.device) < lengths[:, None]
        logits = self._model(input_ids=tokens, attention_mask=mask.long()).logits.float()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self._label]
        return [float(score) for score in scores.cpu()]

    def _filler(self, ids: Sequence[Sequence[int]]) -> int:
        """The model's own; where it has none, a token that ends no input: the model is read at the last other one."""
        if self._own_filler is not None:
            return self._own_filler
        ends = {each[-1] for each in ids}
        return next(token for token in range(len(ends) + 1) if token not in ends)


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
