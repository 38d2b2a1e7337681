"""`python -m tests.chaos.read_store FOLDER`: everything that a store says, as a digest of each table, or its refusal.

In a process of its own, since LMDB itself may end the process that reads a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from asyncrl.errors import StoreError
from asyncrl.replay.store.store import MULTIPLE, TABLES, StoreReader
from asyncrl.replay.store.transaction import Transaction


def digest(tx: Transaction, table: str) -> str:
    found = hashlib.sha256()
    for key in tx.keys(table):
        found.update(key)
        found.update(repr(tx.members(table, key)).encode() if table in MULTIPLE else bytes(tx.get_bytes(table, key)))  # type: ignore[arg-type]
    return found.hexdigest()


def main() -> None:
    try:
        store = StoreReader(Path(sys.argv[1]))
        with store.transaction() as tx:
            answer = {"values": {table: digest(tx, table) for table in TABLES}}
    except StoreError as error:
        answer = {"error": {"StoreError": str(error)}}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
