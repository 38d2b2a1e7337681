"""Process reward models with a value head, as Skywork-o1-Open-PRM: a step's score is sigmoid(value at its last token).

The folder holds a backbone for `AutoModel` with its tokenizer, and `value_head.safetensors` with `weight` float[1, H]
and `bias` float[1]. The model reads the transcript as it is, special tokens included, through its own tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.encoding import micro_batches, tokenize
from asyncrl.scoring.transcript import Transcript

HEAD_FILE = "value_head.safetensors"


class ValueHeadModel:
    """A backbone with a linear head on its last hidden states; see `load_value_head`.

    `micro_tokens` bounds one forward pass, padding included.
    """

    def __init__(
        self, backbone: Any, tokenizer: Any, weight: Tensor, bias: Tensor, name: str, micro_tokens: int
    ) -> None:
        self._backbone = backbone.eval()
        self._tokenizer = tokenizer
        self._weight = weight
        self._bias = bias
        self._name = name
        self._micro_tokens = micro_tokens
        self._max_length: int = backbone.config.max_position_embeddings

    @property
    def name(self) -> str:
        return self._name

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """The scores of each transcript. Raises ScoringError: a transcript is longer than the model can read."""
        inputs = [tokenize(transcript, self._tokenizer) for transcript in transcripts]
        for ids, _ in inputs:
            if len(ids) > self._max_length:
                raise ScoringError(f"the transcript has {len(ids)} tokens; {self._name} reads {self._max_length}")
        scores = [np.zeros(0, np.float32) for _ in inputs]
        with_steps = [index for index, (_, ends) in enumerate(inputs) if ends]
        for batch in micro_batches([len(inputs[index][0]) for index in with_steps], self._micro_tokens):
            chosen = [with_steps[position] for position in batch]
            for index, values in zip(chosen, self._forward([inputs[index] for index in chosen]), strict=True):
                scores[index] = values
        return [StepScores.of_logits(each) for each in scores]

    @torch.inference_mode()
    def _forward(self, inputs: Sequence[tuple[list[int], list[int]]]) -> list[NDArray[np.float32]]:
        device = self._weight.device
        longest = max(len(ids) for ids, _ in inputs)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in inputs], device=device)
        # No attention mask: the backbone is causal, so that nothing sees the padding on the right.
        hidden = self._backbone(input_ids=tokens, use_cache=False).last_hidden_state
        rows = torch.tensor([row for row, (_, ends) in enumerate(inputs) for _ in ends], device=device)
        columns = torch.tensor([end for _, ends in inputs for end in ends], device=device)
        values = hidden[rows, columns].float() @ self._weight[0].float() + self._bias.float()
        flat: NDArray[np.float32] = values.cpu().numpy()
        return np.split(flat, np.cumsum([len(ends) for _, ends in inputs])[:-1])


def load_value_head(
    path: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, micro_tokens: int = 16384
) -> ValueHeadModel:
    """The model in the folder `path`. Raises ConfigError: the folder is not of this family."""
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    file = Path(path) / HEAD_FILE
    if not file.is_file():
        raise ConfigError(f"scoring.prm={path}: there is no {HEAD_FILE} in it; name a folder of this family")
    head = load_file(file, device=device)
    backbone = AutoModel.from_pretrained(path, dtype=dtype).to(device)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.items()}
    hidden = backbone.config.hidden_size
    if shapes != {"weight": (1, hidden), "bias": (1,)}:
        raise ConfigError(
            f"scoring.prm={path}: {HEAD_FILE} holds {shapes}; it must hold weight (1, {hidden}), bias (1,)"
        )
    name = f"{Path(path).name}@{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    return ValueHeadModel(
        backbone, AutoTokenizer.from_pretrained(path), head["weight"], head["bias"], name, micro_tokens
    )
