"""`asyncrl resume RUN [KEY=VALUE ...]`: continues a run with the configuration in its folder.

RUN is the folder of a run, such as runs/NAME, or its name. KEY=VALUE changes a key that may change during a run
(docs/configuration.md).

Addresses and ports that the command line of the run did not name are chosen again. Relative paths in the configuration
are relative to the working directory, so call this command in the directory where the run was started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.config.commands import command_name
from asyncrl.config.exits import EXIT_USAGE
from asyncrl.config.locations import CONFIG_FILE, refuse_fine_tuning
from asyncrl.launch import local
from asyncrl.launch.addresses import words_left_open
from asyncrl.runs.finding import require_run


def words_of(name: str) -> list[str]:
    """Return the command line of `asyncrl train` that continues a run. Raises ConfigError: the run does not exist, or
    it is a fine-tuning."""
    run_dir = require_run(name).folder
    refuse_fine_tuning(run_dir)
    if run_dir.name in ("", ".."):
        run_dir = run_dir.resolve()
    paths = ((run_dir / CONFIG_FILE).absolute(), run_dir.parent, run_dir.name)
    file, parent, name = (str(path).replace("'", "\\'") for path in paths)
    return [f"experiment='{file}'", f"run.dir='{parent}'", f"run.name='{name}'", *words_left_open(run_dir)]


def main(argv: Sequence[str]) -> int:
    """Continue a run, and return the exit status."""
    name, *words = argv or [""]
    if not name or name in ("-h", "--help"):
        sys.stdout.write(f"usage: {command_name()} RUN [KEY=VALUE ...]\n\n{__doc__}")
        return 0 if name else EXIT_USAGE
    return local.main([*words_of(name), *words])
