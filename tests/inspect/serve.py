"""`python -m tests.inspect.serve FOLDER`: a replay in a process of its own, as a store's reader needs it; prints
where it listens, and ends with its standard input."""

from __future__ import annotations

import sys
from pathlib import Path

import zmq

from asyncrl.types import RunIdentity
from tests.replay.test_server import Running

OWN_RUN = RunIdentity("run", "its id")


def main() -> None:
    with zmq.Context() as context:
        running = Running(Path(sys.argv[1]), context, run=OWN_RUN)
        sys.stdout.write(f"{running.endpoint}\n")
        sys.stdout.flush()
        sys.stdin.read()
        running.kill()


if __name__ == "__main__":
    main()
