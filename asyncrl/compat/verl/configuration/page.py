"""`python -m asyncrl.compat.verl.configuration.page docs/verl.md` writes the lists of verl's keys on that page.

The lists are a table of keys with a counterpart, a list of keys without a counterpart, and a table of older names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.compat.verl.configuration.table import TABLE

PLACE = re.compile(r"(<!-- keys of verl -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The text of the page, with its lists written again."""
    lines = "".join(f"{line}\n" for line in (*_with_counterpart(), "", *_without_counterpart(), "", *_older_names()))
    return PLACE.sub(lambda place: place[1] + lines + place[2], text)


def _with_counterpart() -> Iterator[str]:
    yield "### Keys with a counterpart"
    yield from ("| key of verl | key here | what becomes of it |", "| --- | --- | --- |")
    for row in TABLE:
        if row.here and not row.alias_of:
            here = re.sub(r"^([a-z_.]+)$", r"`\1`", row.here)
            yield f"| {_quoted(row.there)} | {here} | {row.sentence} |"


def _without_counterpart() -> Iterator[str]:
    yield "### Keys without a counterpart"
    yield "The translation leaves these keys out. After each key, the list says why, or what to use instead."
    yield "`data` (`tokenizer`, `use_shm`) means `data.tokenizer` and `data.use_shm`. A name that ends in `.*` means"
    yield "all keys of this section that the page does not name elsewhere."
    yield ""
    yield from (f"* {_by_section(row.there)}: {row.sentence}" for row in TABLE if not row.here)


def _older_names() -> Iterator[str]:
    yield "### Older names"
    yield "A configuration may use the names of older releases of verl, or of its asynchronous recipes."
    yield ""
    yield from ("| newer name | older names |", "| --- | --- |")
    for new in dict.fromkeys(row.alias_of for row in TABLE if row.alias_of):
        yield f"| `{new}` | {_quoted([row.there[0] for row in TABLE if row.alias_of == new])} |"


def _by_section(keys: Sequence[str]) -> str:
    """The keys as text. Three or more keys of one section follow the section's name in brackets."""
    section = min((key.rpartition(".")[0] for key in keys), key=len)
    if len(keys) < 3 or not all(section and key.startswith(f"{section}.") for key in keys):
        return _quoted(keys)
    return f"`{section}` ({_quoted([key.removeprefix(f'{section}.') for key in keys])})"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
