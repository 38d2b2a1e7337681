"""docs/configuration.md, generated from the schemas: `python -m asyncrl.config.docs FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from asyncrl.config.checks import CHOICES
from asyncrl.config.schema import TrainConfig

HEAD = """# Configuration

Every role reads the same configuration. Three levels, the later wins: the defaults below, an experiment file
(`experiment=NAME`, a file of `configs/experiment/`), the command line (`KEY=VALUE`). `algorithm=NAME` and
`scoring=NAME` take presets of `configs/algorithm/` and `configs/scoring/`. A mapping gets new names with a plus,
`+scoring.rules={my_data: gsm8k}`. `--cfg job` prints what would run, `--help` lists the groups. Unknown keys, bad
values and impossible combinations end the command with a message that names the fix, before anything starts.

This page is generated from `asyncrl/config/schema/`; `make docs` writes it anew.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, cls) for name, cls in _sections(TrainConfig))


def _sections(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, type[Any]]]:
    for name, hint in get_type_hints(cls).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield prefix + name, hint
            yield from _sections(hint, f"{prefix}{name}.")


def _section(name: str, cls: type[Any]) -> str:
    rows = [_row(name, field) for field in fields(cls) if "meaning" in field.metadata]
    if not rows:
        return ""
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    return f"\n## {name}\n{summary}\n\n| key | default | meaning |\n| --- | --- | --- |\n" + "".join(rows)


def _row(section: str, field: Field[Any]) -> str:
    key = f"{section}.{field.name}"
    meaning = str(field.metadata["meaning"]).replace("|", "\\|")
    if key in CHOICES and not all(choice in meaning for choice in CHOICES[key]):
        meaning += f" ({', '.join(CHOICES[key])})"
    return f"| `{key}` | {_default(field)} | {meaning} |\n"


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    shown = str(value).replace("|", "\\|")
    return "must be set" if value == "???" else "none" if value is None else f"`{shown}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
