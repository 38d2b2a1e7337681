"""Qwen2.5-Math-PRM: a small head gives logits for two labels, a wrong and a right step. The logits are read at the
marker `<extra_0>` after each step.

The model's folder is the published checkpoint (huggingface.co/Qwen/Qwen2.5-Math-PRM-7B): a Qwen2 backbone with its
tokenizer and chat template. Its weights contain the head: a linear layer of width H (`score.0`), a ReLU, and a linear
layer with an output for each label (`score.2`). The second label means a right step.

The input is a chat: a system prompt, the problem as the user, and the steps with their markers as the assistant. The
built-in head needs no remote code. With `trust_remote_code` the checkpoint's own class is loaded instead, and its
`model` and `score` are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.scoring.models.causal import CausalPRM, CausalReader, Readout
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encoded, chat_frame, marker, problem_and_steps, words
from asyncrl.scoring.transcript import Transcript

LABELS = 2


@dataclass(frozen=True)
class Params:
    marker: str = option("<extra_0>", "ends each step")
    system: str | None = option(
        "Please reason step by step, and put your final answer within \\boxed{}.", "the system prompt, or null for none"
    )


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """Load the model in the folder. Raises ConfigError: the folder has no model of this family."""
    checkpoint = Checkpoint(config, key)
    model, tokenizer = checkpoint.causal_model("AutoModel"), checkpoint.tokenizer()
    if config.trust_remote_code and hasattr(model, "score"):
        backbone, head = model.model, model.score.float()
    else:
        backbone, head = model, _head(checkpoint, model.config.hidden_size)
    end, written_out = marker(tokenizer, params.marker, f"{key}.params.marker={params.marker}")
    before, between, _ = chat_frame(tokenizer, ["user", "assistant"], f"{key}.path={config.path}", params.system)

    def encode(transcript: Transcript) -> Encoded:
        """Return the tokens of the chat up to the last marker. If a text contains the marker, it is encoded there as
        ordinary characters, not as the marker's token."""
        problem, steps = problem_and_steps(transcript)
        ids = [*before, *written_out(words(tokenizer, problem)), *between]
        reads = []
        for step in steps:
            ids += [*written_out(words(tokenizer, step)), end]
            reads.append([len(ids) - 1])
        return Encoded(ids, reads)

    reader = CausalReader(backbone, contrast(head), config.micro_tokens, micro_inputs=config.micro_inputs)
    return CausalPRM(checkpoint, encode, {reader: 1.0})


def contrast(head: nn.Module) -> Readout:
    """Reads a head of two labels: the positive label's logit minus the negative label's, which is the log-odds of the
    positive label."""

    device = next(head.parameters()).device

    def read(hidden: Tensor, _: Tensor) -> Tensor:
        logits: Tensor = head(hidden.to(device).float())
        return logits[:, 1] - logits[:, 0]

    return read


def _head(checkpoint: Checkpoint, hidden: int) -> nn.Module:
    shapes: dict[str, tuple[int, ...]] = {
        "score.0.weight": (hidden, hidden),
        "score.0.bias": (hidden,),
        "score.2.weight": (LABELS, hidden),
        "score.2.bias": (LABELS,),
    }
    tensors = checkpoint.tensors(shapes)
    with torch.device("meta"):
        head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, LABELS))
    names = [name.removeprefix("score.") for name in shapes]
    head.load_state_dict(dict(zip(names, tensors, strict=True)), assign=True)
    return head
