"""`python -m tests.runs.inspect.serve FOLDER`: a replay in a process of its own, as a store's reader needs it; prints
where it listens, and ends with its standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.types import RunIdentity
from tests.replay.support import ReplayThread

OWN_RUN = RunIdentity("run", "its id")


def main() -> None:
    with ReplayThread(Path(sys.argv[1]), run=OWN_RUN) as replay:
        sys.stdout.write(f"{replay.endpoint}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
