"""The demo's process reward model: the policy's own backbone with a value head, trained on right and wrong steps.

It is saved as `asyncrl/scoring/models/value_head.py` loads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3Model

from asyncrl.demo.arithmetic import random_expression
from asyncrl.demo.batches import batch
from asyncrl.demo.transcripts import judged
from asyncrl.demo.warm_start import descend, make_optimisers, schedule
from asyncrl.scoring.models.value_head import HEAD_FILE

STEPS = 150
BATCH = 24
HELD_OUT = 200


class StepScorer(nn.Module):
    """A value for every token; that of a step's last token judges the step."""

    def __init__(self, backbone: Qwen3Model) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=ids).last_hidden_state)[..., 0]  # type: ignore[no-any-return]


def train_step_scorer(
    policy: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Callable[[str], None],
    steps: int = STEPS,
) -> tuple[StepScorer, float]:
    """Train from a copy of the policy's backbone; returns the scorer and its accuracy on held-out steps."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    backbone = Qwen3Model(policy.config)
    backbone.load_state_dict(policy.model.state_dict())
    scorer = StepScorer(backbone)
    optimisers = make_optimisers(scorer)
    for step in range(steps):
        values, right = _judge(scorer, tokenizer, rng, BATCH)
        loss = nn.functional.binary_cross_entropy_with_logits(values, right)
        descend(scorer, optimisers, loss, schedule(step, steps))
        if (step + 1) % 20 == 0:
            progress(f"step scorer: step {step + 1}/{steps}, loss {loss.item():.3f}")
    with torch.no_grad():
        values, right = _judge(scorer.eval(), tokenizer, random.Random(seed + 1), HELD_OUT)
    return scorer, float(((values > 0) == right.bool()).float().mean())


def _judge(
    scorer: StepScorer, tokenizer: PreTrainedTokenizerFast, rng: random.Random, count: int
) -> tuple[Tensor, Tensor]:
    """Values and labels, float32[K], of the K steps of fresh transcripts."""
    transcripts = [judged(random_expression(rng), rng) for _ in range(count)]
    ids, mask = batch(tokenizer, [messages for messages, _ in transcripts])
    ends = mask & (ids == tokenizer.eos_token_id)
    labels = [float(right) for _, steps in transcripts for right in steps]
    return scorer(ids)[ends], torch.tensor(labels)


def save_step_scorer(scorer: StepScorer, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Backbone, tokenizer and head, each in the file where the scoring pool looks for it."""
    scorer.backbone.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head = {"weight": scorer.head.weight.detach().clone(), "bias": scorer.head.bias.detach().clone()}
    save_file(head, folder / HEAD_FILE)
