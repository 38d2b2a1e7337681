"""The ladder's tokenizer, and demonstrations that show how to call the tools, but not when."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from asyncrl.commands.demo.ladder.expressions import Nested, random_nested
from asyncrl.commands.demo.ladder.tasks import SYSTEM_PROMPT, Message, call, careless_operator, first_step, opening
from asyncrl.commands.demo.ladder.tools import LadderCalculator, Undo
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.commands.demo.transcripts import batch

BATCH = 16
OPERATIONS = range(2, 11)
ONE_TOOL: list[Any] = [{"type": "function", "function": LadderCalculator.schema}]
TWO_TOOLS: list[Any] = [*ONE_TOOL, {"type": "function", "function": Undo.schema}]

_UNDONE = 0.2
"""The chance that a turn of a demonstration is an undo, if there is a step to undo."""
_PHRASES = (
    SYSTEM_PROMPT,
    "calculator(operator)",
    "undo()",
    '<tool_call>\n{"name": "undo", "arguments": {}}\n</tool_call>',
)


def ladder_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer, with the ladder's phrases."""
    return build_tokenizer(_PHRASES)


def demonstration(expression: Nested, rng: random.Random, with_undo: bool) -> list[Message]:
    """A transcript with well-formed calls and a copied answer, but with random operators and random undos."""
    taken = [first_step(expression, rng)] if with_undo else []
    messages = opening(expression, taken)
    states = [expression]
    for operator in taken:
        states.append(states[-1].reduced(operator))
    while not states[-1].is_number:
        if with_undo and len(states) > 1 and rng.random() < _UNDONE:
            messages.append(call("undo", {}))
            states.pop()
        else:
            operator = careless_operator(states[-1], rng)
            messages.append(call("calculator", {"operator": operator}))
            states.append(states[-1].reduced(operator))
        messages.append({"role": "tool", "content": states[-1].text})
    return [*messages, {"role": "assistant", "content": states[-1].text}]


def drawn_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Draw demonstrations, all with one tool, or all with two. Return token ids int64[B, T], and a mask bool[B, T] of
    tokens to learn.

    Short expressions are more frequent. All tokens are learned. Tool results are learned, too, because they teach the
    policy to copy, and its own turns have too few tokens for that.
    """
    with_undo = rng.random() < 0.5
    counts = [min(rng.choice(OPERATIONS), rng.choice(OPERATIONS)) for _ in range(BATCH)]
    transcripts = [demonstration(random_nested(rng, count), rng, with_undo) for count in counts]
    ids, _ = batch(tokenizer, transcripts, TWO_TOOLS if with_undo else ONE_TOOL)
    return ids, ids != tokenizer.pad_token_id
