"""`asyncrl data`: make task files from published data sets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.data.gsm8k import convert
from asyncrl.errors import AsyncrlError


def main() -> None:
    """The entry of the command line."""
    parser = argparse.ArgumentParser(prog="asyncrl data", description=__doc__)
    sets = parser.add_subparsers(dest="set", metavar="SET", required=True)
    gsm8k = sets.add_parser("gsm8k", help="GSM8K's published JSON lines to Parquet")
    gsm8k.add_argument("--source", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    gsm8k.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    gsm8k.add_argument("--split", default="train", help="which of the files: train (default) or test")
    arguments = parser.parse_args()
    try:
        rows = convert(arguments.source, arguments.out, arguments.split)
    except AsyncrlError as error:
        sys.stderr.write(f"asyncrl data: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"wrote {rows} tasks to {arguments.out}\n")
