"""`asyncrl keys`: make CURVE keys, with which a run accepts only known clients."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.network.keys import add_client, make_keys

MADE = """made the keys of a server, and of the clients on its own machine, in {folder}
  this machine, which runs replay and learner:  network.keys={folder}
  every other machine:  asyncrl keys --out {folder} --client NAME
Keep server.secret and client.secret private: a process with one of these files is accepted.
"""
ADDED = """made the keys of client {name}, and allowed it
  copy {theirs} to its machine over a channel that you trust, and set network.keys to the copy there
  to refuse this client again: delete its line in {folder}/allowed
"""


def main(argv: Sequence[str]) -> None:
    """The command's entry point."""
    parser = argparse.ArgumentParser(prog="asyncrl keys", description=f"{__doc__} See docs/security.md.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the keys, the server's network.keys")
    parser.add_argument("--client", metavar="NAME", help="make keys for one more machine, which runs only clients")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.out
    if arguments.client is None:
        make_keys(folder)
        message = MADE.format(folder=folder)
    else:
        theirs = add_client(folder, arguments.client)
        message = ADDED.format(folder=folder, name=arguments.client, theirs=theirs)
    sys.stdout.write(message)
