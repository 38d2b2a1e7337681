"""`asyncrl report RUN [--out FILE]`: a run as one HTML file, to keep, to print and to send.

It has what came of the run, plots, a few episodes, the configuration, versions and hardware. RUN is the folder of a
run, such as runs/NAME, or its name; it may still run. The file loads nothing from elsewhere. It names paths and hosts
of this machine, and shows text of the run's episodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.commands import command_name
from asyncrl.machine.files import write_whole
from asyncrl.runs.report.page import run_page
from asyncrl.runs.report.run import read_run

REPORT_FILE = "report.html"


def main(argv: Sequence[str]) -> None:
    """The entry of the command line. Ends with a message and status 1 where there is no such run, or the file cannot be
    written."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write this file (RUN/{REPORT_FILE})")
    given = parser.parse_args(argv)
    sys.stdout.write(f"{write_report(given.run, given.out)}\n")


def write_report(name: str, out: Path | None = None) -> Path:
    """Write the report of a run into its folder, or to `out`, and return the file. Raises ConfigError: there is no such
    run, or its configuration cannot be read; OSError."""
    run = read_run(name)
    file = out or run.folder / REPORT_FILE
    write_whole(file, run_page(run))
    return file
