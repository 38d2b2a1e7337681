"""`asyncrl stop RUN`: asks the process that runs RUN to stop, and waits until everything has ended.

RUN is the folder of a run, such as runs/NAME, or its name. The run may have been started in another terminal, or on
another machine that shares the folder. `asyncrl resume RUN` continues the run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.config.commands import command_name
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.launch.ownership import stop
from asyncrl.runs.finding import find_run, require_run, starting_run


def main(argv: Sequence[str]) -> None:
    """Run the command line. Raises NotRunningError: there is nothing to stop."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    given = parser.parse_args(argv)
    # A run that starts for the first time has no configuration yet.
    run = find_run(given.run) or starting_run(given.run) or require_run(given.run)
    run_dir = run.folder
    stop(run_dir, lambda text: sys.stderr.write(f"{text}\n"))
    if not (run_dir / CONFIG_FILE).exists():
        sys.stdout.write(f"{run_dir} has ended before it started anything\n")
        return
    done, resume = "", f"asyncrl resume {shlex.quote(str(run_dir))}"
    with suppress(KeyError):
        summary = run.summary()
        done, resume = f" after {summary['steps']} of {summary['planned_steps']} steps", summary["next"][0]
    sys.stdout.write(f"{run_dir} has ended{done}; to continue: {resume}\n")
