"""`asyncrl from-verl [CONFIG] [KEY=VALUE ...] [--out FILE]`: a verl PPO configuration becomes an experiment file.

CONFIG is a YAML file, such as the one that verl's ppo_trainer prints with --cfg job, or a shell script (.sh) like
verl's examples. KEY=VALUE, +KEY=VALUE, ++KEY=VALUE and ~KEY override CONFIG. All other keys have verl's defaults.
In these words $NAME is a variable of the environment.

A script is not run. The command reads only its words with dotted keys, and the file that its --config-name names. Start
the command in the folder in which the script would start.

Prints the differences, the keys without a counterpart, and what to use instead. The experiment file has these lines as
comments. Without --out it is printed. docs/verl.md lists all keys.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.compat.report import experiment_text, refused, write
from asyncrl.compat.verl.configuration.script import NOT_NAMED, NamedConfig
from asyncrl.compat.verl.configuration.source import read_noting
from asyncrl.compat.verl.configuration.translation import translate
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
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="read NAME.yaml in the folder of --config-path")
    parser.add_argument("--config-path", "-cp", metavar="FOLDER", help="the folder of the file NAME.yaml")
    given = parser.parse_intermixed_args(argv)
    if not given.words and not given.config_name:
        parser.error("name a configuration file of verl, or keys of verl as KEY=VALUE")
    first = given.words[0] if given.words else "="
    file = Path(first) if "=" not in first and first[:1] != "~" else None
    named = NamedConfig(given.config_name, given.config_path)
    write(*translated(file, given.words[1:] if file else given.words, given.out, named), given.out)


def translated(
    file: Path | None, words: list[str], out: Path | None, named: NamedConfig = NOT_NAMED
) -> tuple[str, list[str]]:
    """The text of the experiment file, and the lines of the report. Raises ConfigError: an input cannot be read."""
    given, unread = read_noting(file, words, os.environ, named)
    result = translate(given)
    text = experiment_text(result, out)
    problems = list(refused(text))
    return text, [*unread, *result.report, *(["Fix before you start a run:"] if problems else []), *problems]
