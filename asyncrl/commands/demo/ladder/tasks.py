"""The rungs of the ladder, which are variants of the demo's task, and their tasks.

* `brackets-N`: expressions with N operations, so that an episode needs N decisions and an answer
* `brackets`: 2 to 10 operations
* `sparse`: 8 to 10 operations. Random choices of operators (`careless_value`) find the value in none of 24 tries
* `undo`: 3 to 6 operations, and a second tool that undoes a step. Each task begins with a first step. If a wrong step
is possible, the first step is wrong in half of the tasks
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.commands.demo.ladder.expressions import Nested, distinct_nested
from asyncrl.commands.demo.transcripts import LEANING
from asyncrl.ids import task_id
from asyncrl.types import Task

SYSTEM_PROMPT = "Work out the expression step by step with the tools, and give the number."
CARELESS_TRIES = 24
HORIZONS = (2, 4, 6, 8, 10)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder. With `is_sparse` it has only expressions that random choices get wrong. With
    `has_first_step`, the prompt shows a first step."""

    name: str
    operations: tuple[int, ...]
    is_sparse: bool = False
    has_first_step: bool = False

    @property
    def tools(self) -> list[str]:
        """The value of `actor.tools`."""
        names = ["LadderCalculator", "Undo"] if self.has_first_step else ["LadderCalculator"]
        return [f"asyncrl.commands.demo.ladder.{name}" for name in names]

    @property
    def most_turns(self) -> int:
        """The limit of turns: enough for all operations, the answer, an undone step and a few refused calls."""
        return max(self.operations) + 4 + 2 * self.has_first_step


RUNGS: Mapping[str, Rung] = {
    rung.name: rung
    for rung in (
        *(Rung(f"brackets-{count}", (count,)) for count in HORIZONS),
        Rung("brackets", tuple(range(2, 11))),
        Rung("sparse", (8, 9, 10), is_sparse=True),
        Rung("undo", (3, 4, 5, 6), has_first_step=True),
    )
}


def call(name: str, arguments: Mapping[str, str]) -> Message:
    # Arguments are text, because structs in a Parquet column would give each call the arguments of all tools.
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def careless_operator(expression: Nested, rng: random.Random) -> str:
    """A random operator in the part of the expression that the calculator works in. The policy chooses in this way
    before training."""
    operators = expression.workplace.operators
    return rng.choices(operators, [LEANING[each] for each in operators])[0]


def careless_value(expression: Nested, rng: random.Random) -> int:
    while not expression.is_number:
        expression = expression.reduced(careless_operator(expression, rng))
    return int(expression.text)


def rung_expressions(rung: Rung, count: int, rng: random.Random, avoid: Collection[Nested] = ()) -> list[Nested]:
    """Draw `count` different expressions of the rung that are not in `avoid`."""
    if not rung.is_sparse:
        return distinct_nested(count, rng, rung.operations, avoid)
    found: dict[Nested, None] = {}
    while len(found) < count:
        (expression,) = distinct_nested(1, rng, rung.operations, avoid)
        if all(careless_value(expression, rng) != expression.value() for _ in range(CARELESS_TRIES)):
            found[expression] = None
    return list(found)


def opening(expression: Nested, taken: Collection[str] = ()) -> list[Message]:
    """The messages before the policy's first turn. `taken` has the operators of the steps that the messages show."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": expression.text},
    ]
    for operator in taken:
        expression = expression.reduced(operator)
        messages += [call("calculator", {"operator": operator}), {"role": "tool", "content": expression.text}]
    return messages


def first_step(expression: Nested, rng: random.Random) -> str:
    """A first operator. If the expression has right and wrong operators, both kinds have the same chance."""
    operators = sorted(set(expression.workplace.operators))
    right = [each for each in operators if expression.reduced(each).value() == expression.value()]
    wrong = [each for each in operators if each not in right]
    return rng.choice(wrong if wrong and rng.random() < 0.5 else right)


def ladder_task(rung: Rung, expression: Nested, split: str, index: int, rng: random.Random) -> Task:
    source = f"asyncrl/{rung.name}"
    taken = [first_step(expression, rng)] if rung.has_first_step else []
    return Task(
        id=task_id(source, split, index),
        messages=opening(expression, taken),
        ground_truth=str(expression.value()),
        data_source=source,
        extra_info={
            "split": split,
            "index": index,
            "tools_kwargs": {"calculator": {"expression": expression.text, "taken": taken}},
        },
    )
