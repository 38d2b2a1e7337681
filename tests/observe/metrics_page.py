"""docs/metrics.md as data: the names of all metrics by kind of file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (`.+?) \| (.*?) \| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, list[str]]:
    """The names in the table of each section; words in capital letters stand for any text."""
    sections = PAGE.read_text().split("\n## ")[1:]
    return {
        section.split("\n")[0]: [name for row in ROW.finditer(section) for name in re.findall("`(.+?)`", row[1])]
        for section in sections
    }


def undocumented(kind: str, names: Iterable[str]) -> list[str]:
    """Which of the names the page lacks for a kind of file, such as actor."""
    patterns = [
        re.sub(r"[A-Z]+", ".+", re.escape(name))
        for section, known in documented().items()
        if section == "All files" or re.match(r"\w+", section)[0] == kind
        for name in known
    ]
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]
