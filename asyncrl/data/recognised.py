"""Finds the prompt and the ground truth in files whose columns are not verl's, if the names of the columns are clear.

The names are those of data sets for TRL: `prompt`, `question` or `problem`, and `ground_truth`, `answer` or `solution`.
All other columns become fields of `extra_info`, so that reward functions get them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

import pyarrow as pa

from asyncrl.data.columns import is_plain, is_text
from asyncrl.data.layout import TRUTH, RowLayout
from asyncrl.errors import DataError

PROMPTS = ("question", "problem")
TRUTHS = ("answer", "solution")
FULL_TRUTHS = (TRUTH, *TRUTHS, "reward_model.ground_truth")
LIKELY_PROMPTS = ("messages", "conversations", "instruction", "query", "input", "text")
LIKELY_TRUTHS = ("label", "target", "output", "response", "completion")
"""The columns in LIKELY_PROMPTS and LIKELY_TRUTHS are used only if the configuration names them. A refusal proposes the
first of each that a file has."""
OF_VERL = ("prompt", "data_source", "reward_model", "extra_info", "tools", "environment", "images")
"""The columns of verl's layout. They do not become fields of `extra_info`."""


def recognised(
    layout: RowLayout,
    place: str,
    names: Collection[str],
    wanted: Collection[str],
    has_text: Callable[[str], bool],
) -> RowLayout:
    """The layout of a file with the columns `names`. The result keeps the columns of `layout`. It is `layout` itself in
    three cases: `layout` names the prompt and the ground truth, the columns are verl's, or no prompt or ground truth is
    found.

    The columns `wanted` do not become fields of `extra_info`. `has_text` tells if a column holds texts. Raises
    DataError, which names the file `place`: two columns may be the prompt or the ground truth.
    """
    given = layout.columns
    if {"prompt", TRUTH} <= {*given} or "reward_model" not in wanted:
        return layout
    prompts = [given["prompt"]] if "prompt" in given else _found("prompt", names, PROMPTS)
    truths = [given[TRUTH]] if TRUTH in given else _found(TRUTH, names, TRUTHS)
    if len(prompts) > 1:
        raise _either(place, "prompt", prompts, names, given)
    if not prompts:
        return layout
    (prompt,) = prompts
    if "reward_model" in names:
        is_new = "prompt" not in given and has_text(prompt)
        return replace(layout, columns={**given, "prompt": prompt}) if is_new else layout
    if len(truths) > 1:
        raise _either(place, TRUTH, truths, names, given)
    if not truths:
        return layout
    (truth,) = truths
    further = {each: each for each in names if each not in (*OF_VERL, *wanted, TRUTH) and "." not in each}
    return replace(layout, columns={"prompt": prompt, TRUTH: truth, **further, **given})


def of_schema(layout: RowLayout, place: str, schema: pa.Schema, wanted: Collection[str]) -> RowLayout:
    """The layout of a file with this schema. Two kinds of columns do not become fields of `extra_info`: columns of
    bytes, such as images, and columns whose values a message cannot contain unchanged."""
    sent = [each.name for each in schema if is_plain(each.type) and "binary" not in str(each.type)]
    known = [name for name in schema.names if name in (*sent, *OF_VERL, *wanted)]
    return recognised(layout, place, known, wanted, lambda name: is_text(schema.field(name).type))


def lacking(place: str, missing: Iterable[str], names: Iterable[str], layout: RowLayout) -> DataError:
    """The error for a file without required columns. If the names of its columns suggest a mapping, the error shows the
    setting `data.columns` to write."""
    given, known = [*missing], sorted(names)
    said = f"{place} has no column {', '.join(given)}; it has {', '.join(known)}"
    if "messages" in names:
        said += " (a column messages holds demonstrations, which `asyncrl sft` trains)"
    if not {"prompt", "reward_model"} & {*given}:
        return DataError(f"{said}; add it to the file")
    prompt = layout.columns.get("prompt") or _guess(known, ("prompt", *PROMPTS, *LIKELY_PROMPTS))
    truth = layout.columns.get(TRUTH) or _guess(known, (*FULL_TRUTHS, *LIKELY_TRUTHS))
    if prompt is None:
        return DataError(
            f"{said}; name the columns of the prompt and of the ground truth in data.columns (docs/data.md)"
        )
    if truth is None:
        what = "the column of the ground truth, or any column if the reward needs none"
        return DataError(f"{said}; name {what}, as {_columns(prompt, prompt, layout.columns)}")
    return DataError(f"{said}; name the columns, as {_columns(prompt, truth, layout.columns)}")


def alike(wanted: str, names: Collection[str]) -> str | None:
    """The column of `names` that probably holds what another data set calls `wanted`; None if no name is alike."""
    if wanted in names:
        return wanted
    for others in (("prompt", *PROMPTS), FULL_TRUTHS):
        if wanted in others and (found := _guess(names, others)):
            return found
    return next(iter(get_close_matches(wanted, sorted(names), 1)), None)


def columns_line(columns: Mapping[str, str]) -> str:
    """The word of the command line that sets `data.columns`, quoted for a shell."""
    return f'data.columns="{{{", ".join(f"{field}: {column}" for field, column in columns.items())}}}"'


def _guess(names: Collection[str], likely: Iterable[str]) -> str | None:
    return next((each for each in likely if each.partition(".")[0] in names), None)


def _found(field: str, names: Collection[str], others: Collection[str]) -> list[str]:
    """The columns that may be a field: the one with the field's name, or else those whose names are in `others`."""
    return [field] if field in names else [each for each in others if each in names]


def _either(
    place: str, field: str, found: Sequence[str], names: Collection[str], given: Mapping[str, str]
) -> DataError:
    """The error for a file with two columns that may be the same field. The setting that it shows has the columns
    `given`, and the first of the two."""
    prompt, truth = _guess(names, ("prompt", *PROMPTS)), _guess(names, FULL_TRUTHS)
    line = _columns(prompt or found[0], truth or prompt or found[0], given)
    return DataError(
        f"{place} has the columns {' and '.join(found)}, and either may be the {field.replace('_', ' ')}; it has "
        f"{', '.join(sorted(names))}: name one, as {line}"
    )


def _columns(prompt: str, truth: str, given: Mapping[str, str]) -> str:
    """The word of the command line that names both columns, and the columns `given`."""
    return columns_line({"prompt": prompt, TRUTH: truth, **given})
