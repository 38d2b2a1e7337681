"""The demo's process reward model: the policy's own backbone with a value head, trained on right and wrong steps.

Half of the training transcripts work out random expressions, the other half calculations from GSM8K. The model is saved
in the format of `asyncrl/scoring/models/value_head.py`.

`gsm8k.txt` has calculations with two to four steps on whole numbers, from the first 2,000 training problems of GSM8K
(Cobbe et al. 2021, arXiv:2110.14168, MIT), in their order. The solutions of GSM8K mark a calculation as `<<12*2=24>>`.
A calculation with an earlier result is joined with the earlier calculation if precedence allows: `<<12*2=24>>` and
`<<12+24=36>>` became `12+12*2`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3Model

from asyncrl.commands.demo.arithmetic import Expression, distinct_expressions, parse
from asyncrl.commands.demo.transcripts import batch, judged
from asyncrl.commands.demo.warm_start import descend, make_optimisers, schedule
from asyncrl.machine.long_work import LongWork, unmeasured_work
from asyncrl.scoring.models.value_head import HEAD_FILE

BATCH = 24
JUDGEMENTS_FILE = "held_out.json"
GSM8K = Path(__file__).with_name("gsm8k.txt")


class StepScorer(nn.Module):
    """Gives every token a value. The value of a step's last token is the step's score."""

    def __init__(self, backbone: Qwen3Model) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=ids).last_hidden_state)[..., 0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The scorer's accuracy on the steps of unseen expressions, and the share of right steps among them."""

    accuracy: float
    right: float


def train_step_scorer(
    policy: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Callable[[str], None],
    steps: int,
    held_out: int,
) -> tuple[StepScorer, dict[str, HeldOut]]:
    """Train a copy of the policy's backbone. Return the scorer, and its results on `held_out` unseen expressions of
    each source.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    scorer = _untrained(policy)
    optimisers = make_optimisers(scorer)
    noted = [expression for line in GSM8K.read_text().split() if (expression := parse(line))]
    sources = {"generated": distinct_expressions(held_out, random.Random(seed + 1)), "GSM8K": noted[:held_out]}
    unseen = {each for expressions in sources.values() for each in expressions}
    known = [each for each in noted if each not in unseen]
    work = LongWork("step scorer", steps, "steps")
    for step in range(steps):
        drawn = distinct_expressions(BATCH // 2, rng, avoid=unseen) + rng.choices(known, k=BATCH // 2)
        values, right = _judge(scorer, tokenizer, rng, drawn)
        loss = nn.functional.binary_cross_entropy_with_logits(values, right)
        descend(scorer, optimisers, loss, schedule(step, steps))
        work.done += 1
        if (step + 1) % 20 == 0:
            progress(f"{work.text}, loss {loss.item():.3f}")
    with unmeasured_work("judging the step scorer", say=progress):
        return scorer.eval(), {name: _held_out(scorer, tokenizer, rng, drawn) for name, drawn in sources.items()}


def _untrained(policy: Qwen3ForCausalLM) -> StepScorer:
    backbone = Qwen3Model(policy.config)
    backbone.load_state_dict(policy.model.state_dict())
    return StepScorer(backbone)


def _held_out(
    scorer: StepScorer, tokenizer: PreTrainedTokenizerFast, rng: random.Random, expressions: Sequence[Expression]
) -> HeldOut:
    with torch.no_grad():
        values, right = _judge(scorer, tokenizer, rng, expressions)
    return HeldOut(((values > 0) == right.bool()).float().mean().item(), right.mean().item())


def _judge(
    scorer: StepScorer, tokenizer: PreTrainedTokenizerFast, rng: random.Random, expressions: Sequence[Expression]
) -> tuple[Tensor, Tensor]:
    """Judge the K steps of new transcripts, one for each expression. Return the scorer's values float32[K] and the
    labels float32[K]."""
    transcripts = [judged(expression, rng) for expression in expressions]
    ids, mask = batch(tokenizer, [messages for messages, _ in transcripts])
    ends = mask & (ids == tokenizer.eos_token_id)
    labels = [float(right) for _, steps in transcripts for right in steps]
    return scorer(ids)[ends], torch.tensor(labels)


def save_step_scorer(
    scorer: StepScorer, tokenizer: PreTrainedTokenizerFast, judgements: Mapping[str, HeldOut], folder: Path
) -> None:
    """Write backbone, tokenizer and head for the scoring pool, and the results on unseen expressions."""
    scorer.backbone.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head = {"weight": scorer.head.weight.detach().clone(), "bias": scorer.head.bias.detach().clone()}
    save_file(head, folder / HEAD_FILE)
    found = {source: asdict(judged) for source, judged in judgements.items()}
    (folder / JUDGEMENTS_FILE).write_text(json.dumps(found, indent=2) + "\n")
