"""`python -m tests.replay.read_slowly FOLDER`: reads a store in one transaction, as a reader that hangs; says "reading"
once it does, and ends with its standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.replay.store.store import StoreReader


def main() -> None:
    with StoreReader(Path(sys.argv[1])).transaction():
        sys.stdout.write("reading\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
