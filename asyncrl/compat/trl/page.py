"""`python -m asyncrl.compat.trl.page docs/trl.md` writes the lists of TRL's keys on that page."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.compat.trl.table import ROWS

PLACE = re.compile(r"(<!-- keys of TRL -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The text of the page, with its lists written again."""
    lines = "".join(f"{line}\n" for line in (*_with_counterpart(), "", *_without_counterpart()))
    return PLACE.sub(lambda place: place[1] + lines + place[2], text)


def _with_counterpart() -> Iterator[str]:
    yield "### Arguments with a counterpart"
    yield from ("| argument of TRL | key here | what becomes of it |", "| --- | --- | --- |")
    for row in ROWS:
        if row.here:
            here = row.here if row.here.startswith("`") else f"`{row.here}`"
            yield f"| `{row.there[0]}` | {here} | {row.sentence} |"


def _without_counterpart() -> Iterator[str]:
    yield "### Arguments without a counterpart"
    yield "The translation leaves these arguments out, and the report names each that your configuration sets."
    yield ""
    yield from (f"* {', '.join(f'`{each}`' for each in row.there)}: {row.sentence}" for row in ROWS if not row.here)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
