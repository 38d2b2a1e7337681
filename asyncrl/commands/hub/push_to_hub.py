"""`asyncrl push-to-hub RUN|FOLDER REPO`: upload an exported model with its card to the Hugging Face hub.

RUN is the folder of a run, such as runs/NAME, or its name. The command uploads the run's exported model, or with
--checkpoint a checkpoint of the run. FOLDER is any model folder. REPO is the name of the repository, such as
OWNER/NAME; it is created if it does not exist.

The upload needs a token with write access (`hf auth login`, or HF_TOKEN). --dry-run only lists the files, and needs no
token. The run's report contains paths, hosts and episodes, so it is uploaded only with --report.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.commands.hub.hub import HubFile, files_of, model_folder, push, report_of
from asyncrl.config.commands import command_name
from asyncrl.runs.report.svg import short


def main(argv: Sequence[str]) -> None:
    """The command's entry point. If the upload fails, it ends with a message and status 1."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="RUN|FOLDER", help="a run, such as runs/NAME, or the folder of a model")
    parser.add_argument("repo", metavar="REPO", help="name of the repository, such as OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--checkpoint", type=int, metavar="N", help="upload the checkpoint after N learner steps")
    parser.add_argument("--report", action="store_true", help="upload the report of the run, too")
    parser.add_argument("--dry-run", action="store_true", help="list the files, and upload nothing")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    folder = model_folder(given.model, given.checkpoint)
    files = files_of(folder, given.repo, report_of(given.model) if given.report else None)
    if given.dry_run:
        sys.stdout.write(listed(folder, given.repo, files))
    else:
        message = f"Upload {Path(folder).resolve().name} of asyncrl"
        sys.stdout.write(f"{push(files, given.repo, given.private, message)}\n")


def listed(folder: Path, repo: str, files: Sequence[HubFile]) -> str:
    """The files that would be uploaded, one per line."""
    lines = [f"{short(each.size):>8}B  {each.name}" for each in files]
    total = f"{short(sum(each.size for each in files))}B in {len(files)} files of {folder} would be uploaded to {repo}"
    return "".join(f"{line}\n" for line in (*lines, total))
