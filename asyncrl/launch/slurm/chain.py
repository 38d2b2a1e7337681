"""`launchers/slurm_launch.sh --chain N [OPTIONS OF SBATCH] KEY=VALUE ...`: submits N jobs of Slurm in sequence.

This is for sites where jobs cannot be requeued, or may run only for a short time. Each job resumes the run when the job
before it has ended, for any reason. Once the run is done or has solved its tasks, or `asyncrl stop` has stopped it, the
remaining jobs end at once. `--dry-run` prints the commands that would submit the jobs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self
from uuid import uuid4

from asyncrl.config.exits import exit_status
from asyncrl.config.secrets import KEY_VALUE, shown_words
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.slurm.commands import ask_slurm
from asyncrl.machine.files import write_whole
from asyncrl.runs.run import Run

OPTION, DRY_RUN = "--chained=", "--dry-run"
STOPPED_FILE = "stopped-chain"
"""The file in the run's folder with the id of a chain that was stopped by hand, or whose run has solved its tasks."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """The `number`-th of the `count` jobs of the chain `id`."""

    id: str
    number: int
    count: int

    @classmethod
    def of(cls, word: str) -> Self:
        """Return the link that a word of a job's command line names."""
        name, number, count = word.removeprefix(OPTION).split("/")
        return cls(name, int(number), int(count))

    def __str__(self) -> str:
        return f"job {self.number} of {self.count} of the chain"

    @property
    def option(self) -> str:
        """The word that names this link in the job's command line."""
        return f"{OPTION}{self.id}/{self.number}/{self.count}"

    @property
    def is_last(self) -> bool:
        return self.number == self.count

    def why_nothing_is_left(self, run_dir: Path, steps: int) -> str:
        """Return the reason why this job has nothing left to do for a run of `steps` steps, or an empty text if it has
        work."""
        with suppress(KeyError):
            summary = Run(run_dir).summary()
            if summary["result"] == "done" and summary["planned_steps"] >= steps:
                return "the run is done"
        with suppress(OSError):
            if (run_dir / STOPPED_FILE).read_text() == self.id:
                return "the run was stopped by `asyncrl stop`, or has solved its tasks"
        return ""

    def end(self, run_dir: Path) -> None:
        """Let the later jobs of the chain end at once."""
        write_whole(run_dir / STOPPED_FILE, self.id)


def parse(words: Sequence[str]) -> tuple[int, str, list[str], list[str]]:
    """Return the number of jobs, the batch script, the options of sbatch, and the words of `asyncrl train`, which begin
    with the first KEY=VALUE. Raises ConfigError: the words have another form."""
    script, *rest = [word for word in words if word != DRY_RUN]
    count, rest = rest[0] if rest else "", rest[1:]
    if not count.isdecimal() or not int(count):
        raise ConfigError("--chain: write how many jobs, as in --chain 5 --time=4:00:00 KEY=VALUE")
    first = next((index for index, word in enumerate(rest) if KEY_VALUE.match(word)), len(rest))
    if late := [word for word in rest[first:] if word.startswith("-")]:
        raise ConfigError(
            f"--chain: options of sbatch come before the first KEY=VALUE, and {late[0]} comes after {rest[first]}"
        )
    return int(count), script, rest[:first], rest[first:]


def submit(words: Sequence[str], show_only: bool = False) -> None:
    """Submit the jobs, or print the commands. Raises ConfigError; UnavailableError: Slurm refuses a job."""
    count, script, options, rest = parse(words)
    name, jobs = uuid4().hex[:8], list[str]()
    for number in range(1, count + 1):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        link = ChainLink(name, number, count)
        command = ["sbatch", "--parsable", "--no-requeue", *after, *options, script, link.option, *rest]
        if show_only:
            sys.stdout.write(f"{shlex.join(shown_words(command))}\n")
            jobs.append(f"JOB{number}")
            continue
        try:
            # In a federation of clusters, a semicolon and the name of the cluster follow the job's id.
            jobs.append(ask_slurm(*command).strip().partition(";")[0])
        except UnavailableError as error:
            done = f"; to cancel the jobs before it: scancel {' '.join(jobs)}" if jobs else ""
            raise UnavailableError(f"{link} was not submitted: {error}{done}") from error
    if not show_only:
        sys.stdout.write(f"submitted, in this order: {' '.join(jobs)}; to end the chain, `scancel` all of them\n")


if __name__ == "__main__":
    sys.exit(exit_status(partial(submit, sys.argv[1:], DRY_RUN in sys.argv), "asyncrl"))
