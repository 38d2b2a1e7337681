"""The demo's policy: a small Qwen3 model that has learnt well-formed calls and exact copying, but not precedence.

Muon trains the matrices, and AdamW the other parameters: with Muon the model learns to copy in a third of the steps.
During the warm start, two further heads predict the second and third next token (multi-token prediction, Gloeckle et
al. 2024, arXiv:2404.19737). With these heads, the ability to copy survives reinforcement learning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.commands.demo.arithmetic import random_expression
from asyncrl.commands.demo.transcripts import batch, demonstration
from asyncrl.machine.long_work import LongWork

BATCH = 16
MATRIX_LR = 0.02
OTHER_LR = 3e-3
WARMUP = 20
REPORT_EVERY = 20
FURTHER = (2, 3)
FURTHER_WEIGHT = 0.5


def model_config(tokenizer: PreTrainedTokenizerFast, layers: int = 3, hidden: int = 192) -> Qwen3Config:
    """A Qwen3 configuration with a little over a million parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=448,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Callable[[str], None],
    steps: int,
    drawn: Callable[[random.Random], tuple[Tensor, Tensor]] | None = None,
) -> Qwen3ForCausalLM:
    """Train a new model on demonstrations. `progress` gets lines of text.

    `drawn` draws a batch, by default of the demo's demonstrations: token ids int64[B, T], and a mask bool[B, T] of the
    tokens to learn.
    """
    drawn = drawn or (lambda rng: _demo_batch(tokenizer, rng))
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    further = nn.ModuleList(nn.Linear(model.config.hidden_size, len(tokenizer), bias=False) for _ in FURTHER)
    optimisers = [*make_optimisers(model), torch.optim.AdamW(further.parameters(), lr=OTHER_LR, weight_decay=0.0)]
    work = LongWork("warm start", steps, "steps")
    for step in range(steps):
        ids, mask = drawn(rng)
        hidden = model.model(input_ids=ids).last_hidden_state
        loss = _loss(model.lm_head, hidden, ids, mask, 1)
        ahead = sum(_loss(head, hidden, ids, mask, distance) for head, distance in zip(further, FURTHER, strict=True))
        descend(model, optimisers, loss + FURTHER_WEIGHT * (1 - step / steps) * ahead, schedule(step, steps))
        work.done += 1
        if (step + 1) % REPORT_EVERY == 0:
            progress(f"{work.text}, loss {loss.item():.3f}")
    model.eval()
    return model


def _demo_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Tensor, Tensor]:
    return batch(tokenizer, [demonstration(random_expression(rng), rng) for _ in range(BATCH)])


def _loss(head: nn.Module, hidden: Tensor, ids: Tensor, mask: Tensor, distance: int) -> Tensor:
    """The cross-entropy of `head`, which predicts each masked token from the hidden state `distance` tokens earlier."""
    chosen = mask[:, distance:]
    return nn.functional.cross_entropy(head(hidden[:, :-distance][chosen]), ids[:, distance:][chosen])


def make_optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and heads."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.0, momentum=0.95)
    return [muon, torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def descend(model: nn.Module, optimisers: list[torch.optim.Optimizer], loss: torch.Tensor, scale: float) -> None:
    """Run one update, with each learning rate multiplied by `scale`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group.setdefault("full_lr", group["lr"]) * scale
        optimiser.step()
        optimiser.zero_grad()


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rates: a linear warm-up, then a cosine down to 0.05."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP) * max(0.05, cosine)
