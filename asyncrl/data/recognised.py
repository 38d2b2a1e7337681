"""Finds the prompt and the ground truth in files whose columns are not verl's, if the names of the columns are clear.

The names are those of data sets for TRL: `prompt`, `question` or `problem`, and `ground_truth`, `answer` or `solution`.
All other columns become fields of `extra_info`, so that reward functions get them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import pyarrow as pa

from asyncrl.data.columns import is_plain, is_text
from asyncrl.data.layout import TRUTH, RowLayout
from asyncrl.errors import DataError

PROMPTS = ("question", "problem")
TRUTHS = ("answer", "solution")
OF_VERL = ("prompt", "data_source", "reward_model", "extra_info", "tools", "environment")
"""The columns of verl's layout. They do not become fields of `extra_info`."""


def recognised(
    layout: RowLayout,
    place: str,
    names: Collection[str],
    wanted: Collection[str],
    has_text: Callable[[str], bool],
) -> RowLayout:
    """The layout of a file with the columns `names`. If `layout` names columns, or the columns are verl's, the result
    is `layout`.

    The columns `wanted` keep their place. `has_text` tells if a column holds texts. Raises DataError, which names the
    file `place`: two columns may be the prompt or the ground truth.
    """
    if layout.columns or "reward_model" not in wanted:
        return layout
    prompt = _one(place, "prompt", names, PROMPTS)
    if prompt is None:
        return layout
    if "reward_model" in names:
        return replace(layout, columns={"prompt": prompt}) if has_text(prompt) else layout
    truth = _one(place, TRUTH, names, TRUTHS)
    if truth is None:
        return layout
    further = {each: each for each in names if each not in (*OF_VERL, *wanted, TRUTH) and "." not in each}
    return replace(layout, columns={"prompt": prompt, TRUTH: truth, **further})


def of_schema(layout: RowLayout, place: str, schema: pa.Schema, wanted: Collection[str]) -> RowLayout:
    """The layout of a file with this schema. Columns of bytes, such as images, do not become fields of `extra_info`,
    nor do columns whose values a message cannot contain unchanged."""
    sent = [each.name for each in schema if is_plain(each.type) and "binary" not in str(each.type)]
    known = [name for name in schema.names if name in (*sent, *OF_VERL, *wanted)]
    return recognised(layout, place, known, wanted, lambda name: is_text(schema.field(name).type))


def lacking(place: str, missing: Iterable[str], names: Iterable[str], layout: RowLayout) -> DataError:
    """The error for a file without required columns."""
    given = [*missing]
    other = {"prompt", "reward_model"} & {*given} and not layout.columns
    line = "; name the columns to use, as data.columns={prompt: COLUMN, ground_truth: COLUMN}" if other else ""
    return DataError(f"{place} has no column {', '.join(given)}; it has {', '.join(sorted(names))}{line}")


def _one(place: str, field: str, names: Collection[str], others: Collection[str]) -> str | None:
    """The column of a field. It is the one with the field's name, or else the one whose name is in `others`; None if
    there is none."""
    found = [field] if field in names else [each for each in others if each in names]
    if len(found) < 2:
        return found[0] if found else None
    other = f"ground_truth: {TRUTHS[0]}" if field == "prompt" else "prompt: COLUMN"
    first = f"{field}: {found[0]}"
    line = f"{first}, {other}" if field == "prompt" else f"{other}, {first}"
    raise DataError(
        f"{place} has the columns {' and '.join(found)}, and either may be the {field.replace('_', ' ')}; it has "
        f"{', '.join(sorted(names))}: name one, as data.columns={{{line}}}"
    )
