"""`asyncrl report RUN [--out FILE]`: a run as one HTML file, to keep, to print and to send.

It has the results of the run, plots, a few episodes, the configuration, versions and hardware. RUN is the folder of a
run, such as runs/NAME, or its name; it may still run. The file loads nothing from elsewhere. It names paths and hosts
of this machine, and shows text of the run's episodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from asyncrl.config.commands import command_name
from asyncrl.config.exits import exit_status
from asyncrl.runs.report.page import REPORT_FILE, write_report


def main(argv: Sequence[str]) -> None:
    """The entry of the command line. Raises ConfigError: the run does not exist; OSError: the file is not writable."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write this file (RUN/{REPORT_FILE})")
    given = parser.parse_args(argv)
    sys.stdout.write(f"{write_report(given.run, given.out)}\n")


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl report"))
