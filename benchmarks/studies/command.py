"""The command of a study: `python -m benchmarks.studies.NAME`. A second call resumes the study."""

from __future__ import annotations

import argparse
import fcntl
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.commands.demo.ladder.prepare import PreparedRung, prepare_rung
from asyncrl.errors import ConfigError
from benchmarks.studies import report
from benchmarks.studies.changed import changed_settings, check
from benchmarks.studies.figures import Row
from benchmarks.studies.results import FOLDER, Results, ResultsError
from benchmarks.studies.runner import TRAIN, Prepare, Runner
from benchmarks.studies.search import all_failed, best_rate
from benchmarks.studies.study import EXPERIMENT, LR, MODEL_PATH, RUNG, WARM_START, Levels, Run, Study
from benchmarks.studies.summary import Cell, Spread, cell_of

CACHE = Path(".cache/studies")
RUNS = Path("runs/studies")
IN_USE = "in-use"
STOPPED = 130
"""The exit status after Ctrl-C, as of `asyncrl train`."""


def prepared(run: Run) -> PreparedRung | None:
    """The tasks and the policy of a run on the ladder, from the cache. None: the run has an experiment."""
    if EXPERIMENT in run.settings:
        return None
    trained, held_out = (
        prepare_rung(CACHE, rung, run.seed, _say, run.settings[WARM_START]) for rung in (run.rung, run.held_out)
    )
    return replace(trained, held_out=held_out.held_out)


def main(
    study: Study,
    words: Sequence[str] | None = None,
    runs: Path = RUNS,
    train: Sequence[str] = TRAIN,
    prepare: Prepare = prepared,
) -> None:
    """Run a study's command. `runs` gets a folder of runs for each study; `train` is called with a run's arguments."""
    options = _parser(study).parse_args(words)
    if len(options.gpus) > options.parallel:
        sys.exit(f"{study.name}: --gpus names {len(options.gpus)} GPUs, so use --parallel {len(options.gpus)} or more")
    if not (cells := list(study.cells(_only(study, options.only)))):
        sys.exit(
            f"{study.name}: --only {' '.join(options.only)} names no cell, which the study leaves out; name others"
        )
    try:
        changed = changed_settings(options.settings)
        if study.experiment:
            # Results belong to a model.
            changed[MODEL_PATH] = str(options.model)
        if changed:
            check(study, cells, changed)
        results = Results(options.results / f"{study.name}.parquet", study.factors)
        if options.page is not None:
            report.parts_of(options.page, study)
        if not options.plan and not options.report:
            results.require_writable()
    except (ConfigError, ValueError) as error:
        sys.exit(f"{study.name}: {error}")
    asked = _Asked(study, results, cells, range(options.seeds), changed)
    if options.plan:
        print(asked.plan(options.parallel))
        return
    if not options.report:
        end = time.monotonic() + options.budget_s
        runner = Runner(
            runs / study.name,
            results,
            prepare,
            _say,
            options.parallel,
            lambda: time.monotonic() > end,
            options.limit_s,
            options.retry_failed,
            options.keep,
            train,
            options.gpus,
        )
        _run(study, asked, runner, runs / study.name)
    for level in asked.without_rate():
        _say(
            f"{study.name}: every search of {level} failed, so it has no learning rate, and its runs do not "
            f"start; see the reasons in {results.path}, then use --retry-failed, or give {LR}=VALUE"
        )
    if asked.curves():
        print(asked.write(options.page))
    elif options.report:
        _say(f"{study.name}: no run has ended yet")


class _Asked:
    """The requested cells and seeds of a study, with changed settings."""

    def __init__(
        self, study: Study, results: Results, cells: list[Levels], seeds: Iterable[int], changed: dict[str, Any]
    ) -> None:
        self._study = study
        self._results = results
        self._cells = cells
        self._seeds = list(seeds)
        self._changed = changed
        self._search = None if LR in changed else study.search

    def searches(self) -> list[Run]:
        """The runs that find the learning rates of the cells' levels; none if the command sets a learning rate."""
        return [run for level in self._searched() for run in self._study.searches(level, self._changed)]

    def without_rate(self) -> list[str]:
        """The levels whose searches have all failed."""
        found = {level: self._study.searches(level, self._changed) for level in self._searched()}
        return [level for level, searches in found.items() if all_failed(searches, self._results)]

    def _searched(self) -> list[str]:
        """The levels of the cells whose learning rates are searched."""
        search = self._search
        return list(dict.fromkeys(cell[search.factor] for cell in self._cells)) if search else []

    def mains(self) -> list[Run]:
        """The runs of all cells with a known learning rate. They are ordered by seed, so that all cells have equally
        many seeds if the budget ends early."""
        rates = [(cell, self._rate(cell)) for cell in self._cells]
        known = [(cell, rate) for cell, (is_known, rate) in rates if is_known]
        return [self._study.run(cell, seed, rate, self._changed) for seed in self._seeds for cell, rate in known]

    def is_complete(self) -> bool:
        """True if no run is left that can start."""
        return all(self._rows(run) for run in (*self.searches(), *self.mains()))

    def plan(self, parallel: int) -> str:
        """Describe the number of runs, and the time of the missing runs, estimated from the ended ones."""
        searches, mains = self.searches(), self.mains()
        ended = [rows[-1] for run in (*searches, *mains) if (rows := self._rows(run))]
        count = len(searches) + len(self._cells) * len(self._seeds)
        told = f"{self._study.name}: {count} runs, {len(searches)} of them to find learning rates; {len(ended)} ended"
        if (seconds := Spread.of(row["run_seconds"] for row in ended)) is None:
            return told
        hours = (count - len(ended)) * seconds.median / parallel / 3600
        took = f"{seconds.median:.0f} s ({seconds.least:.0f} to {seconds.greatest:.0f})"
        told += f"; one took {took}, so the others take {hours:.1f} hours, {parallel} at a time"
        if used := Spread.of(row["processor_seconds"] for row in ended):
            hours = (count - len(ended)) * used.median / 3600
            told += f"; one used {used.median:.0f} s of one core, so the others use {hours:.1f} hours of one core"
        return told

    def curves(self) -> dict[tuple[str, ...], list[list[Row]]]:
        """The runs that have ended, by the levels of their cell."""
        found: dict[tuple[str, ...], list[list[Row]]] = {}
        for run in self.mains():
            if rows := self._rows(run):
                found.setdefault(tuple(run.levels.values()), []).append(rows)
        return found

    def cells(self) -> list[Cell]:
        curves = self.curves()
        return [
            cell_of(cell, runs[0][0]["lr"], runs, self._study.target, self._compared(cell))
            for cell in self._cells
            if (runs := curves.get(tuple(cell.values())))
        ]

    def _compared(self, cell: Levels) -> list[list[Row]]:
        """The ended runs of a cell's baseline, even if the command leaves the baseline out. Empty for the
        baseline itself."""
        beside = {**cell, **self._study.baseline}
        is_known, rate = self._rate(beside)
        if beside == cell or not is_known:
            return []
        runs = [self._study.run(beside, seed, rate, self._changed) for seed in self._seeds]
        return [rows for run in runs if (rows := self._rows(run))]

    def write(self, page: Path | None) -> str:
        """Return the study's tables, and write them with a picture into the page, if one is given."""
        study, cells, curves = self._study, self.cells(), self.curves()
        about = report.conditions(study, [row for runs in curves.values() for each in runs for row in each])
        if page is not None:
            report.write_page(page, study, about, cells, curves)
        parts = [about, report.overview(study, cells), report.table(study, cells), report.failures(cells)]
        return "\n\n".join(filter(None, parts))

    def _rows(self, run: Run) -> list[Row]:
        return self._results.rows(run.fingerprint)

    def _rate(self, cell: Levels) -> tuple[bool, float | None]:
        """Return whether the learning rate of a cell is known, and its value. None: the study's own."""
        if self._search is None:
            return True, None
        found = best_rate(self._study.searches(cell[self._search.factor], self._changed), self._results)
        return found is not None, found


def _run(study: Study, asked: _Asked, runner: Runner, folder: Path) -> None:
    """Run the requested runs, and print whether all have ended. Exits: Ctrl-C, or the results cannot be read."""
    try:
        with alone(folder):
            runner.run(asked.searches())
            done = runner.run(asked.mains())
    except KeyboardInterrupt:
        _say(f"{study.name}: stopped; the same command goes on")
        sys.exit(STOPPED)
    except ResultsError as error:
        sys.exit(f"{study.name}: {error}")
    _say(f"{study.name}: {'all runs have ended' if done and asked.is_complete() else 'the same command goes on'}")


def _parser(study: Study) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.studies.{study.name}", description=study.question)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="changed settings of all runs")
    if study.experiment:
        parser.add_argument(
            "--model",
            type=Path,
            required=True,
            help="folder of the pretrained model; results belong to it as it is written here",
        )
    parser.add_argument("--seeds", type=_count, default=3, help="how many seeds, from 0 (default: 3)")
    levels = _levels(study).replace("%", "%%")
    only = f"only these levels of a factor, after all KEY=VALUE: {levels}"
    parser.add_argument("--only", nargs="+", default=[], metavar="FACTOR=LEVEL", help=only)
    parser.add_argument("--parallel", type=_count, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[],
        help="GPUs that the runs divide among themselves (default: each sees all)",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="seconds until runs are stopped; the next call resumes them",
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which a run counts as failed")
    parser.add_argument("--retry-failed", action="store_true", help="repeat failed runs")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that have ended")
    parser.add_argument("--plan", action="store_true", help="only print the number of runs and their time")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument(
        "--page", type=Path, help="write table and picture into this page, such as benchmarks/results/studies.md"
    )
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results")
    return parser


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder of runs. Exits: another command has locked it, and would repeat the same runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / IN_USE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another command runs this study in {folder}: wait for its end, or use --parallel N")
        yield


def _count(word: str) -> int:
    if (count := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return count


def _levels(study: Study) -> str:
    """The arguments for all levels, quoted for a shell."""
    return ", ".join(shlex.quote(f"{name}={each}") for name, levels in study.factors.items() for each in levels)


def _only(study: Study, words: Sequence[str]) -> dict[str, set[str]]:
    """The named levels. Exits: a factor or level does not exist."""
    only: dict[str, set[str]] = {}
    for word in words:
        factor, _, level = word.partition("=")
        if level not in study.factors.get(factor, {}):
            is_setting = "." in factor or factor in (RUNG, WARM_START)
            fix = "put KEY=VALUE before --only" if is_setting else f"there are {_levels(study)}"
            sys.exit(f"{study.name}: --only {word} names no level; {fix}")
        only.setdefault(factor, set()).add(level)
    return only


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
