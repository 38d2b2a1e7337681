"""Transcripts of the demo's task: demonstrations for the policy, labelled steps for the step scorer, and batches."""

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
"""The relative chances of the operators in demonstrations; `demonstration` explains them."""
_CARELESS = 0.05
"""The share of steps that copy the expression wrongly. It is small, so that the scorer mostly learns the order of
operations."""


def call(operator: str, expression: str) -> Message:
    arguments: Mapping[str, str] = {"operator": operator, "expression": expression}
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(expression: Expression, rng: random.Random) -> list[Message]:
    """A transcript with well-formed calls and exact copying, but with operations in random order.

    Sums come first a little more often than products. Otherwise, for some seeds, the greedy policy would follow the
    right order by chance. With this preference for sums, the untrained accuracy is 0.3 to 0.55 for every seed.
    """
    messages: list[Message] = [*opening(expression)]
    while expression.operators:
        (operator,) = rng.choices(expression.operators, [LEANING[each] for each in expression.operators])
        messages.append(call(operator, str(expression)))
        expression = expression.reduced(operator)
        messages.append({"role": "tool", "content": str(expression)})
    return [*messages, {"role": "assistant", "content": str(expression)}]


def judged(expression: Expression, rng: random.Random) -> tuple[list[Message], list[bool]]:
    """A transcript with right and wrong steps, and for each step True if it is right.

    A call is right if it copies the expression exactly and keeps its value. An answer is right if no operators are left
    and it is the remaining number.
    """
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
    """Token ids int64[B, T], padded on the right, and a mask bool[B, T] of assistant turns with their end tokens."""
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
