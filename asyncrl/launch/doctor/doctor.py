"""`asyncrl doctor [RUN]`: finds the faults of this host, and prints a fix for each.

It checks GPUs, their driver, torch and NCCL, and the limits of open files and memory. It also checks the folder of the
runs, the disk, the clock, ports, keys and Python packages. With --python it also checks the Python of SGLang servers.

With a RUN it takes the folder, the keys, the addresses and the engine from the run's configuration. Before the run
starts, its ports must be free; while it runs, they must answer. This host must also have the programs that the run's
launcher needs. Call the command on each host of a run: it leaves a file in the folder, and compares clocks, keys and
versions with the files of the other hosts.

The exit status is 1 if there is a problem, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.commands import command_name
from asyncrl.config.exits import EXIT_FAILURE
from asyncrl.config.keys import did_you_mean
from asyncrl.config.schema import NetworkConfig
from asyncrl.launch.doctor.checks import Diagnosis, Severity, examine
from asyncrl.launch.doctor.facts import AddressFact, HostFacts
from asyncrl.launch.doctor.gathering import gather
from asyncrl.launch.doctor.launching import launcher_facts
from asyncrl.launch.doctor.sharing import address_facts, connection_error, key_facts, since_start_s
from asyncrl.runs.finding import RUNS, require_run
from asyncrl.runs.from_config import read_config

WIDE = 1000
"""The width of the table in characters if the output is not a terminal, so that lines are not wrapped."""
STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def main(argv: Sequence[str]) -> int:
    """Print the faults of this host, and return the exit status."""
    given = _parsed(_parser(), argv)
    facts = _facts(given)
    found = examine(facts)
    if given.json:
        sys.stdout.write(json.dumps({"host": facts.host, "diagnoses": [asdict(each) for each in found]}) + "\n")
    else:
        show(facts.host, found, Console(width=None if sys.stdout.isatty() else WIDE))
    return EXIT_FAILURE if any(each.verdict is Severity.PROBLEM for each in found) else 0


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. An unknown option ends the process, with the nearest option in the message."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = re.findall(r"--[a-z]+", parser.format_help())
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a run, such as runs/NAME, or its name")
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"folder of all runs, as in run.dir ({RUNS})")
    parser.add_argument("--keys", metavar="DIR", help="folder of the keys, as in network.keys")
    parser.add_argument(
        "--python", type=_program, metavar="PYTHON", help="the Python of SGLang servers, as in engine.python"
    )
    parser.add_argument("--connect", type=_address, action="append", default=[], metavar="HOST:PORT", help=REACH)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


REACH = "an address that this host must reach; may be given several times"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is not a HOST:PORT")
    return host.strip("[]"), int(port)


def _program(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a Python, such as sglang-env/bin/python")
    return text


def _facts(given: argparse.Namespace) -> HostFacts:
    """Gather the facts. Raises ConfigError: the run does not exist, or its configuration is of another version."""
    folder, network, python, addresses, launcher = RUNS, NetworkConfig(), "", [], []
    if given.run is not None:
        run = require_run(given.run).folder
        config = read_config(run)
        folder, network = run.parent, config.network
        python = config.engine.python if config.engine.launches else ""
        running_s = since_start_s(run)
        if running_s is not None or config.cluster.launcher != "ray":
            # Before a run with Ray starts, its addresses are not known: Ray chooses the nodes at each start.
            addresses = address_facts(network, config.replay.shards, running_s)
        launcher = launcher_facts(config.cluster)
    if given.keys is not None:
        network = replace(network, keys=given.keys)
    addresses += [
        AddressFact("--connect", f"{host}:{port}", False, connection_error(host, port)) for host, port in given.connect
    ]
    keys, server_key = key_facts(network)
    return gather(given.folder or folder, addresses, keys, server_key, given.python or python, launcher)


def show(host: str, found: Sequence[Diagnosis], console: Console) -> None:
    """Print the diagnoses as a table for people."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in found:
        text = Text(each.text)
        if each.mend:
            text.append(f"\nto mend it: {each.mend}", "dim")
        table.add_row(Text(each.verdict, STYLES[each.verdict]), each.check, text)
    console.print(table)
    counts = {verdict: sum(each.verdict is verdict for each in found) for verdict in Severity}
    problems, warnings = counts[Severity.PROBLEM], counts[Severity.WARNING]
    console.print(f"\n{host}: {_number(problems, 'problem')}, {_number(warnings, 'warning')}", highlight=False)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
