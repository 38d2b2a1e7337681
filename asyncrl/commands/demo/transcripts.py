"""Worked transcripts of the demo's task: demonstrations for the policy, judged steps for the step scorer, and batches
of both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from asyncrl.commands.demo.arithmetic import Expression, opening
from asyncrl.commands.demo.tokenizer import ASSISTANT_MARK
from asyncrl.commands.demo.tool import StepCalculator

TOOLS: list[Any] = [{"type": "function", "function": StepCalculator.schema}]

Message = dict[str, Any]

LEANING = {"+": 1.75, "*": 1.4, "-": 1.0}
"""The chance that the policy takes an operator first, before it is trained: sums a little more than products."""
_CARELESS = 0.05
"""The share of careless steps: small, so that the scorer learns the order of operations."""


def call(operator: str, expression: str) -> Message:
    arguments: Mapping[str, str] = {"operator": operator, "expression": expression}
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(expression: Expression, rng: random.Random) -> list[Message]:
    """Well-formed calls and exact copying, but the operations in random order, as if any order were right.

    Sums are a little more likely to come first than products. Otherwise the greedy policy of some seeds would follow
    the right order by chance. With this its accuracy is 0.3 to 0.55 for every seed.
    """
    messages: list[Message] = [*opening(expression)]
    while expression.operators:
        (operator,) = rng.choices(expression.operators, [LEANING[each] for each in expression.operators])
        messages.append(call(operator, str(expression)))
        expression = expression.reduced(operator)
        messages.append({"role": "tool", "content": str(expression)})
    return [*messages, {"role": "assistant", "content": str(expression)}]


def judged(expression: Expression, rng: random.Random) -> tuple[list[Message], list[bool]]:
    """A transcript with right and wrong steps, and which of them are right. A call is right if it copies the expression
    exactly and keeps its value. An answer is right if it is the value of an expression without operators."""
    messages: list[Message] = [*opening(expression)]
    right: list[bool] = []
    while expression.operators and (rng.random() > _CARELESS / 4):
        operator = rng.choice(expression.operators)
        copied = _miscopied(expression, rng) if rng.random() < _CARELESS else expression
        messages.append(call(operator, str(copied)))
        following = copied.reduced(operator)
        right.append(copied == expression and following.value() == expression.value())
        expression = following
        messages.append({"role": "tool", "content": str(expression)})
    answer = expression.numbers[0] + (rng.choice([-10, -1, 1, 10]) if rng.random() < _CARELESS else 0)
    right.append(not expression.operators and answer == expression.numbers[0])
    return [*messages, {"role": "assistant", "content": str(answer)}], right


def _miscopied(expression: Expression, rng: random.Random) -> Expression:
    numbers = list(expression.numbers)
    index = rng.randrange(len(numbers))
    numbers[index] += rng.choice([-10, -2, -1, 1, 2, 10])
    return Expression(tuple(numbers), expression.operators)


def batch(
    tokenizer: PreTrainedTokenizerFast, transcripts: Sequence[list[Message]], tools: list[Any] = TOOLS
) -> tuple[Tensor, Tensor]:
    """Token ids int64[B, T], padded on the right, and bool[B, T], true on the assistant's turns with their ends."""
    rows: Any = [tokenizer.apply_chat_template(each, tools=tools, return_dict=False) for each in transcripts]
    masks = [torch.tensor(list(_assistant(row, tokenizer))) for row in rows]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, pad_sequence(masks, batch_first=True)


def _assistant(row: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> Iterator[bool]:
    mark, end = tokenizer.convert_tokens_to_ids(ASSISTANT_MARK), tokenizer.eos_token_id
    inside = False
    for token in row:
        yield inside
        inside = token == mark or (inside and token != end)
