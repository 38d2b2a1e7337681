"""Uses a model for AutoModelForSequenceClassification as an outcome model: one score for a whole episode.

The folder holds the model with its tokenizer. With a chat template, the input is the problem as the user's message and
the whole response as the assistant's; without one, it is the problem, a newline and the response. If the model has one
label, the score is the logit of this label. If it has several labels, the score is the probability of `label`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.attention import longest_plain
from asyncrl.scoring.models.batching import micro_batches, pass_cost
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import (
    Encode,
    Encoded,
    chat_frame,
    embedding_rows,
    longest_input,
    problem_and_steps,
    words,
)
from asyncrl.scoring.transcript import Transcript

_PADDED = {
    *("bert", "distilbert", "roberta", "xlm-roberta", "electra", "albert", "deberta-v2", "modernbert"),
    *("gpt2", "gpt_neox", "opt", "bloom"),
}


@dataclass(frozen=True)
class Params:
    label: int = option(1, "the index of the good label, if the model has several labels", "[0, inf)")


class SequenceClassifier:
    """An outcome model that is a sequence classifier; see `load`. Raises ConfigError: see `Checkpoint.encoder`."""

    def __init__(self, checkpoint: Checkpoint, model: Any, encode: Encode, label: int) -> None:
        self.name = checkpoint.name
        self._model = model
        named = getattr(model.config.get_text_config(), "pad_token_id", None)
        is_token = named is not None and 0 <= named < model.get_input_embeddings().num_embeddings
        self._padding = named if is_token else None
        self._label = label
        # With a limit of 0 tokens, every input becomes a batch of its own.
        self._micro_tokens = checkpoint.micro_tokens if classifies_padded(model) else 0
        self._micro_inputs = checkpoint.micro_inputs
        self._encoder = checkpoint.encoder(encode, longest_input(model), embedding_rows(model))

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        """See RewardModel."""
        ids = [self._encoder(transcript).ids for transcript in transcripts]
        scores = [0.0] * len(ids)
        cost = pass_cost(self._model.device.type)
        for batch in micro_batches([len(each) for each in ids], self._micro_tokens, cost, self._micro_inputs):
            for index, score in zip(batch, self._forward([ids[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    @torch.inference_mode()
    def _forward(self, ids: Sequence[Sequence[int]]) -> list[float]:
        longest, padding = max(len(each) for each in ids), self._padding
        if padding is None:
            # The model reads its score at the last token that is not padding, so no input may end with the padding
            # token.
            ends = {each[-1] for each in ids}
            padding = next(token for token in range(len(ends) + 1) if token not in ends)
        self._model.config.get_text_config().pad_token_id = padding
        rows = [[*each, *[padding] * (longest - len(each))] for each in ids]
        tokens = torch.tensor(rows, device=self._model.device)
        lengths = torch.tensor([[len(each)] for each in ids], device=self._model.device)
        mask = torch.arange(longest, device=self._model.device) < lengths
        masked = {"attention_mask": mask.long()} if len(ids) > 1 else {}
        logits = self._model(input_ids=tokens, **masked).logits.float()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self._label]
        return [float(score) for score in scores.cpu()]


def classifies_padded(model: Any) -> bool:
    """True if padding on the right is known not to change the scores of a sequence classifier.

    This holds for models that read the last token that is not padding, and for encoders that mask the padding. Other
    models may mix the padding into other tokens, or read the last position even if it is padding.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    known = isinstance(model, GenericForSequenceClassification) or model.config.model_type in _PADDED
    return known and longest_plain(model.config) == sys.maxsize


def load(config: ScoringModelConfig, params: Params, key: str) -> SequenceClassifier:
    """The model in the folder. Raises ConfigError: the model has no label number `params.label`."""
    checkpoint = Checkpoint(config, key)
    model, tokenizer = checkpoint.model("AutoModelForSequenceClassification"), checkpoint.tokenizer()
    labels = model.config.num_labels
    if labels > 1 and not 0 <= params.label < labels:
        raise ConfigError(f"{key}.params.label={params.label}: the model has the labels 0 to {labels - 1}")
    return SequenceClassifier(checkpoint, model, reading(tokenizer, key), params.label)


def reading(tokenizer: Any, key: str) -> Encode:
    """The encoding of episodes. Raises ConfigError: see `chat_frame`."""
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    frame = chat_frame(tokenizer, ["user", "assistant"], key) if has_chat else None

    def encode(transcript: Transcript) -> Encoded:
        problem, steps = problem_and_steps(transcript)
        response = "\n".join(steps)
        if frame is None:
            return Encoded(tokenizer.encode(f"{problem}\n{response}", split_special_tokens=True), [])
        before, between, after = frame
        return Encoded([*before, *words(tokenizer, problem), *between, *words(tokenizer, response), *after], [])

    return encode
