"""Generates docs/configuration.md from the schema: `python -m asyncrl.config.docs FILE`."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.changes import KIND_KEYS
from asyncrl.config.keys import sections
from asyncrl.config.option import REQUIRED, Option, as_yaml, options, summary
from asyncrl.config.schema import TrainConfig

HEAD = """# Configuration

Every role reads the same configuration. It has three levels, and a later level wins: the defaults below, files, and the
command line.

* The command line sets a key with `KEY=VALUE`: `learner.lr=1e-5`, `actor.tools=[calculator,python]`,
  `scoring.rules.my_data=gsm8k`. Quote a value with special characters twice, once for the shell and once for asyncrl:
  `"data.train='my file.parquet'"`.
* `GROUP=NAME` chooses a file of a group: `algorithm=dapo`, `engine=sglang`, `scoring=pure` and `experiment=demo` choose
  files of `configs/`. `GROUP=FILE.yaml` chooses a file of your own by its path: `experiment=./mine.yaml`
  ([first_run.md](first_run.md)). `mine.yaml` without `GROUP=` is the same as `experiment=mine.yaml`.
* The name of a part of the algorithm means this part with its default parameters: `algorithm.loss=gspo`. For a list, a
  single text means a list with this one item: `actor.tools=python`.
* `--cfg job` prints the configuration that would run, without secrets. `--help` lists groups and sections, and
  `--help SECTION` lists the keys of a section.

Before anything starts, asyncrl refuses unknown keys, values that are not allowed, and combinations that cannot work. It
lists all of them at once, one a line, with the fix. Then it looks for all models, files, tools, rules and
parts of the algorithm that the values name, and lists those that are missing.

Intervals are written as in mathematics: (0, inf) excludes 0, and [0, inf) includes it. "A mapping to text" is a mapping
from names to texts. "A list of clip, delta" is a list whose items are among these two words. The last column tells
whether a run may resume with a changed value, and if not, why ([faults.md](faults.md)).
[concepts.md](concepts.md#the-terms) explains terms such as group, trajectory, label and dead letter.

This page is generated from `asyncrl/config/schema/`; `make docs` writes it again.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(prefix, type(section)) for prefix, section in sections(TrainConfig()))


def _section(prefix: str, cls: type[Any]) -> str:
    rows = "".join(_row(prefix, option) for option in options(cls))
    if not rows:
        return ""
    head = "| key | default | allowed | meaning | when the run resumes |\n| --- | --- | --- | --- | --- |\n"
    return f"\n## {prefix.rstrip('.')}\n{summary(cls)}\n\n{head}{rows}"


def _row(prefix: str, option: Option) -> str:
    default = "must be set" if option.default == REQUIRED else f"`{as_yaml(option.default)}`"
    kept = "its name stays" if is_dataclass(option.type) else "stays"
    key = f"{prefix}{option.name}"
    decides_kinds = any(key in keys for keys in KIND_KEYS.values())
    free = "may change, unless a data source then needs other kinds of scores" if decides_kinds else "may change"
    resumed = f"{kept}: {option.fixed}" if option.fixed else free
    cells = [f"`{key}`", default, option.allowed, option.meaning, resumed]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
