"""`asyncrl evaluate RUN|MODEL [--data FILE] [--n 8] [--step K] [KEY=VALUE ...]`: pass@k, best@k and maj@k, without
training.

The episodes use the same engine, tools and verifiers as in training. For a RUN (its folder or name) the configuration
is the run's, and the policy comes from a checkpoint. Without --data the tasks are those of the run's data.eval. For a
MODEL (a Hugging Face folder or a hub name) KEY=VALUE words and experiment=NAME give the configuration, as for
`asyncrl train`.

With --n 1 each task has one greedy attempt; with a larger N, attempts are sampled at actor.temperature. An attempt is
right if its outcome is at least --threshold (1). Lower the threshold if rules give graded outcomes.

For a task with n scored attempts, of which c are right, pass@k is 1 - C(n-c, k) / C(n, k). A failed attempt is repeated
as in training. If it fails again and again, it counts only as failed, not in means and estimates. docs/evaluate.md has
more.

Repeat the command to resume an interrupted evaluation, or to show a finished one. All episodes stay in the evaluation's
folder: `asyncrl inspect show e0-000000.0.0 --run FOLDER`.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.commands.evaluate.evaluation import RESULT_FILE, evaluate, requested
from asyncrl.commands.evaluate.results import shown_result
from asyncrl.commands.evaluate.samples import samples
from asyncrl.config.commands import command_name
from asyncrl.config.exits import EXIT_FAILURE, exit_status
from asyncrl.config.load import log_to_stderr
from asyncrl.errors import StoppedError

log = logging.getLogger("asyncrl.commands.evaluate")

WIDE = 10_000
"""The width of the tables in characters if the output is not a terminal, so that no name is cut."""


def main(argv: Sequence[str]) -> int:
    """Evaluate, print the result, and return the exit status: 1 if no attempt was scored."""
    given = _parser().parse_intermixed_args(argv)
    log_to_stderr()
    try:
        request = requested(given.target, given.data, given.n, given.step, given.words, given.config_dir)
        folder, result = evaluate(request, given.step, given.threshold)
    except StoppedError as error:
        log.info("%s", error)
        raise
    if given.json:
        sys.stdout.write((folder / RESULT_FILE).read_text())
    else:
        Console(width=None if sys.stdout.isatty() else WIDE).print(shown_result(result))
        sys.stdout.writelines(f"\n{text}\n" for text in samples(folder, given.samples))
    log.info(
        "the result is in %s; `asyncrl inspect show ID --run %s` shows an episode",
        folder / RESULT_FILE,
        shlex.quote(str(folder)),
    )
    return 0 if result.total.scored else EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="RUN|MODEL", help="folder or name of a run, or folder or hub name of a model")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="keys of docs/configuration.md")
    parser.add_argument(
        "--data", metavar="TASKS", help="tasks, as data.train takes them (docs/data.md); default: a run's data.eval"
    )
    parser.add_argument("--n", type=int, default=8, metavar="N", help="attempts at each task (default: 8)")
    parser.add_argument(
        "--step", type=int, metavar="K", help="evaluate a run's checkpoint after K steps; default: the newest"
    )
    parser.add_argument(
        "--threshold", type=float, default=1.0, metavar="T", help="smallest outcome that counts as right (default: 1)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="S",
        help="print S attempts of each data source with their scores (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="also find group files in DIR")
    return parser


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl evaluate"))
