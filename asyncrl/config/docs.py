"""docs/configuration.md, generated from the schemas: `python -m asyncrl.config.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from asyncrl.config.keys import sections
from asyncrl.config.option import REQUIRED, Option, options
from asyncrl.config.schema import TrainConfig

HEAD = """# Configuration

Every role reads the same configuration. Three levels, the later wins: the defaults below, an experiment file
(`experiment=NAME`, a file of `configs/experiment/`), the command line (`KEY=VALUE`). `algorithm=NAME` and
`scoring=NAME` take presets of `configs/algorithm/` and `configs/scoring/`. A mapping gets new names with a plus,
`+scoring.rules={my_data: gsm8k}`. `--cfg job` prints what would run, `--help` lists the groups. Unknown keys, bad
values and impossible combinations end the command before anything starts, with a line for each and the fix.

This page is generated from `asyncrl/config/schema/`; `make docs` writes it anew.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(prefix, type(section)) for prefix, section in sections(TrainConfig()))


def _section(prefix: str, cls: type[Any]) -> str:
    rows = "".join(_row(prefix, option) for option in options(cls))
    if not rows:
        return ""
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    head = "| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n"
    return f"\n## {prefix.rstrip('.')}\n{summary}\n\n{head}{rows}"


def _row(prefix: str, option: Option) -> str:
    cells = [f"`{prefix}{option.name}`", _default(option), option.allowed, option.meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(option: Option) -> str:
    return "must be set" if option.default == REQUIRED else f"`{option.shown_default}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
