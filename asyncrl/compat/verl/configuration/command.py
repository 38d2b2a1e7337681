"""`asyncrl from-verl [CONFIG] [KEY=VALUE ...] [--out FILE]`: a verl PPO configuration becomes an experiment file.

CONFIG is the YAML that verl's ppo_trainer prints with --cfg job, or a shell script (.sh) like verl's examples. A script
is not run: only its words with dotted keys are read. KEY=VALUE, +KEY=VALUE, ++KEY=VALUE and ~KEY override CONFIG. All
other keys have verl's defaults.

Prints the differences, the keys without a counterpart, and what to use instead. The experiment file has these lines as
comments. Without --out it is printed. docs/verl.md lists all keys.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.compat.report import experiment_text, refused, write
from asyncrl.compat.verl.configuration.script import named_config
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate
from asyncrl.compat.yaml_files import read_small
from asyncrl.config.commands import command_name


def main(argv: Sequence[str]) -> None:
    """The command's entry point. If a file cannot be read or written, it ends with a message and status 1."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG KEY=VALUE", help="a YAML file or a script, then keys of verl"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the experiment file to FILE")
    given = parser.parse_intermixed_args(argv)
    if not given.words:
        parser.error("name a configuration file of verl, or keys of verl as KEY=VALUE")
    file = Path(given.words[0]) if "=" not in given.words[0] and given.words[0][:1] != "~" else None
    write(*translated(file, given.words[1:] if file else given.words, given.out), given.out)


def translated(file: Path | None, words: list[str], out: Path | None) -> tuple[str, list[str]]:
    """The text of the experiment file, and the lines of the report. Raises ConfigError: an input cannot be read."""
    result = translate(read_verl(file, words, os.environ))
    text = experiment_text(result, out)
    problems = list(refused(text))
    unread = _unread(file)
    return text, [*unread, *result.report, *(["Fix before a start:"] if problems else []), *problems]


def _unread(file: Path | None) -> list[str]:
    """A warning if a script starts verl with a configuration file that only verl can find (`--config-name`)."""
    name = named_config(read_small(file)) if file is not None and file.suffix == ".sh" else None
    if name is None:
        return []
    return [
        f"Not read: --config-name={name}. Its keys are missing below: let verl print the whole configuration (the "
        "script's command with --cfg job --resolve), and translate that YAML"
    ]
