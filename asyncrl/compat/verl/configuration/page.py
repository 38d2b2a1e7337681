"""`python -m asyncrl.compat.verl.configuration.page docs/verl.md` writes the table of keys on that page anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from asyncrl.compat.verl.configuration.rows import Row
from asyncrl.compat.verl.configuration.table import TABLE

PLACE = re.compile(r"(<!-- keys of verl -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page `text` with its table written anew."""
    lines = ["| of verl | here | what becomes of it |", "| --- | --- | --- |", *map(_line, TABLE)]
    return PLACE.sub(lambda place: place[1] + "\n".join(lines) + "\n" + place[2], text)


def _line(row: Row) -> str:
    names = [f"`{key}`" for key in row.there]
    here = re.sub(r"^([a-z_.]+)$", r"`\1`", row.here)
    return f"| {', '.join(names)} | {here or 'none'} | {row.sentence} |".replace("  ", " ")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
