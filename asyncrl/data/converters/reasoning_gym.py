"""Makes tasks from puzzles that reasoning-gym generates (the extra asyncrl[reasoning-gym]).

The rule `reasoning_gym` scores answers with the data set's own `score_answer`.

With the same name, options and seed, the same tasks are made. A task contains everything that `score_answer` reads.
Demonstrations can be made only for data sets that ask for the value of an expression.

Source: `reasoning_gym.create_dataset` of reasoning-gym 0.1.25.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncrl.data.converters.calculator_calls import Calculation, LeftOut, demonstration
from asyncrl.data.query import SourceQuery
from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.text import reason_of
from asyncrl.types import Task

KIND = "reasoning-gym:"
FORM = f"{KIND}NAME?size=1000&seed=0, with any further options of the data set"
SEED = 0
"""The default seed. Without one, reasoning-gym would use a different seed each time."""
SIZE = 500
"""The default size of almost all data sets."""

ENTRY = "reasoning_gym"
"""The field of `extra_info` with one text: the task's entry in the data set, and the data set's name and options."""

CALCULATED = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")
"""The data sets whose tasks ask for the value of an expression. Their entries have it in `metadata`."""

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def tasks(source: str) -> Iterator[Task]:
    """The tasks of a source such as `reasoning-gym:NAME?size=1000&seed=0`. Raises DataError."""
    query = SourceQuery.of(source, FORM)
    options = {"seed": SEED, **{key: _value(text) for key, text in query.values.items()}}
    dataset = _dataset(source, query.name, options)
    data_source = f"{KIND.rstrip(':')}/{query.name}"
    split = f"seed-{options['seed']}"
    for index in range(len(dataset)):
        try:
            entry = dict(dataset[index])
            question, answer = str(entry["question"]), entry.get("answer")
            text = packed({"name": query.name, "options": options, "entry": entry})
        except Exception as error:
            raise DataError(f"{source}: task {index} cannot be made: {reason_of(error)}") from error
        yield Task(
            id=task_id(data_source, split, index),
            messages=[{"role": "user", "content": question}],
            ground_truth="" if answer is None else str(answer),
            data_source=data_source,
            extra_info={"index": index, "split": split, ENTRY: text},
        )


def demonstrations(source: str) -> Iterator[list[Mapping[str, Any]] | LeftOut]:
    """The messages of a demonstration for each task of `tasks`, or the reason why it has none. Raises DataError."""
    name = SourceQuery.of(source, FORM).name
    if name not in CALCULATED:
        raise DataError(f"{source}: only these data sets have demonstrations: {', '.join(CALCULATED)}")
    for task in tasks(source):
        entry = unpacked(task.extra_info[ENTRY])["entry"]
        calculation = Calculation("", entry["metadata"]["expression"], task.ground_truth)
        yield demonstration(task.messages, [calculation], f"<answer>{task.ground_truth}</answer>")


def check_held_out(train: Iterable[str], held_out: Iterable[str]) -> None:
    """Raises DataError: a held-out source makes some of the tasks of a training source, or a source is malformed.

    Sources of other kinds are ignored. A held-out source that is also listed as a training source is allowed.
    """
    training = {source: _numbers(source) for source in train if source.startswith(KIND)}
    for source in held_out:
        if not source.startswith(KIND) or source in training:
            continue
        name, numbers = _numbers(source)
        for other, (its_name, its_numbers) in training.items():
            if name == its_name and numbers.start < its_numbers.stop and its_numbers.start < numbers.stop:
                raise DataError(
                    f"data.eval: {source} would make training tasks of {other} again, since reasoning-gym makes task i "
                    f"from the number seed + i; write seed={its_numbers.stop} or a larger seed"
                )


def _numbers(source: str) -> tuple[str, range]:
    """The name of a data set, and the numbers from which its tasks are made. If the seed or the size is not a whole
    number, its default is used, since reasoning-gym refuses such an option later."""
    query = SourceQuery.of(source, FORM)
    seed, size = (_value(query.values.get(key, "")) for key in ("seed", "size"))
    first = seed if isinstance(seed, int) else SEED
    return query.name, range(first, first + (size if isinstance(size, int) else SIZE))


def _dataset(source: str, name: str, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"{source} needs reasoning-gym: pip install 'asyncrl[reasoning-gym]' ({error})") from error
    if name not in DATASETS:
        raise DataError(f"{source}: reasoning-gym has no {name}; it has {', '.join(sorted(DATASETS))}")
    if name == "composite":
        raise DataError(f"{source}: name each of its data sets as a separate source, in a list")
    try:
        dataset = reasoning_gym.create_dataset(name, **options)
        len(dataset)  # This fails if the size is not an integer, which the constructor does not check.
        return dataset
    except Exception as error:
        raise DataError(f"{source}: reasoning-gym refuses the options: {reason_of(error)}") from error


def _value(text: str) -> Any:
    """The JSON value of a text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def packed(value: Any) -> str:
    """JSON text from which `unpacked` makes an equal value. Tuples and keys other than text are kept.

    Raises TypeError: the value contains an unsupported type.
    """
    return json.dumps(_plain(value))


def unpacked(text: str) -> Any:
    """The value in a text of `packed`. Raises ValueError: the text is not valid."""
    return json.loads(text, object_hook=_original)


def _plain(value: Any) -> Any:
    match value:
        case tuple():
            return {_TUPLE: [_plain(each) for each in value]}
        case list():
            return [_plain(each) for each in value]
        case dict():
            if all(isinstance(key, str) for key in value):
                return {key: _plain(each) for key, each in value.items()}
            return {_PAIRS: [[_plain(key), _plain(each)] for key, each in value.items()]}
        case None | str() | bool() | int() | float():
            return value
    if hasattr(value, "tolist"):  # This is a number or an array of NumPy.
        return _plain(value.tolist())
    raise TypeError(f"{value!r:.100} of the type {type(value).__name__} cannot be written as text")


def _original(value: dict[str, Any]) -> Any:
    if value.keys() == {_TUPLE}:
        return tuple(value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return dict(value[_PAIRS])
    return value
