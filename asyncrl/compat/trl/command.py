"""`asyncrl from-trl [FILE] [KEY=VALUE ...] [--out FILE]`: a GRPOConfig of TRL becomes an experiment file.

FILE is a Python script with GRPOConfig and GRPOTrainer, the YAML of `trl grpo --config`, or JSON. A script is not run:
values that its text shows are read, and the report names the values that only the running script knows. KEY=VALUE
overrides FILE. All other keys have TRL's defaults.

Prints the differences, the keys without a counterpart, and what to use instead. The experiment file has these lines as
comments. Without --out it is printed. docs/trl.md lists all keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.compat.report import Translated, experiment_text, refused, write
from asyncrl.compat.trl.source import TrlConfig, read_trl
from asyncrl.compat.trl.table import DEFAULTS, TABLE
from asyncrl.config.commands import command_name

LAG = (
    "TRL alternates between generation and training; here both run at once, and training uses data that is at most "
    "replay.max_lag=2 versions old. Set replay.max_lag=0 to alternate"
)


def main(argv: Sequence[str]) -> None:
    """The command's entry point. Raises ConfigError: a file or a word cannot be read."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="FILE KEY=VALUE", help="a script or a file, then keys of TRL")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the experiment file to FILE")
    given = parser.parse_intermixed_args(argv)
    if not given.words:
        parser.error("name a script or a configuration file of TRL, or keys of TRL as KEY=VALUE")
    file = None if "=" in given.words[0] else Path(given.words[0])
    write(*translated(file, given.words[1:] if file else given.words, given.out), given.out)


def translated(file: Path | None, words: Sequence[str], out: Path | None) -> tuple[str, list[str]]:
    """The text of the experiment file, and the lines of the report. Raises ConfigError: an input cannot be read."""
    result = translate(*read_trl(file, words))
    text = experiment_text(result, out)
    problems = list(refused(text))
    return text, [*result.report, *(["Fix before you start a run:"] if problems else []), *problems]


def translate(given: dict[str, Any], remarks: Sequence[str] = ()) -> Translated:
    """Translate keys of TRL. `remarks` are lines about values that could not be read."""
    source = TrlConfig(given, DEFAULTS, remarks)
    settings: dict[str, Any] = {}
    differs = [*source.remarks, LAG]
    for made in TABLE.settings(source):
        if isinstance(made, str):
            differs.append(made)
        else:
            settings[made[0]] = made[1]
    return TABLE.translated(source, source.given, settings, differs)
