"""Runs a study: several runs at a time, until all have ended or the time is over.

A run with results is not repeated. An interrupted run is resumed by `asyncrl train`, since its folder has its name.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

from asyncrl.commands.demo.ladder.prepare import PreparedRung
from asyncrl.machine.child import start_child
from asyncrl.machine.owner import owner_of
from benchmarks.studies.figures import FAILED, Ending, Row, rows_of_run
from benchmarks.studies.results import Results
from benchmarks.studies.study import MODEL_PATH, Run, overrides

TRAIN = (sys.executable, "-m", "asyncrl", "train")
POLL_S = 0.2
STOP_S = 60.0
"""Seconds after a SIGTERM at which a run is killed. A clean stop writes a checkpoint."""
CUT_SHORT = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit statuses of a stopped run: `asyncrl train` has 130, unless it was stopped during its start."""
LAST_WORDS = 300
"""Characters of the output that are kept of a failed run."""
THREADS: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Prepare = Callable[[Run], PreparedRung | None]
"""Makes the policy and the tasks of a run. None: the run's settings name them."""


class Runner:
    """Does the runs that `results` does not have, `parallel` at a time, in folders of `folder`.

    Once `is_over` is true, no run starts, and running ones are stopped; the next call resumes them. A run that takes
    longer than `limit_s` counts as failed. `command` is called with the arguments of `asyncrl train`. The runs
    divide `gpus` among themselves, and each run sees one; without `gpus` each run sees all.
    """

    def __init__(
        self,
        folder: Path,
        results: Results,
        prepare: Prepare,
        say: Callable[[str], None],
        parallel: int = 1,
        is_over: Callable[[], bool] = lambda: False,
        limit_s: float = 3600.0,
        retry_failed: bool = False,
        keep: bool = False,
        command: Sequence[str] = TRAIN,
        gpus: Sequence[int] = (),
    ) -> None:
        self._folder = folder
        self._results = results
        self._prepare = prepare
        self._say = say
        self._parallel = parallel
        self._time_is_over = is_over
        self._limit_s = limit_s
        self._retry_failed = retry_failed
        self._keep = keep
        self._command = command
        self._places: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        for number in range(parallel):
            self._places.put({"CUDA_VISIBLE_DEVICES": str(gpus[number % len(gpus)])} if gpus else {})
        self._stop = threading.Event()
        self._preparing = threading.Lock()
        self._writing = threading.Lock()

    def run(self, runs: Sequence[Run]) -> bool:
        """Do the runs in order. Returns True if all have ended. Ctrl-C stops them cleanly."""
        missing = [run for run in runs if not self._has_ended(run)]
        with ThreadPoolExecutor(self._parallel) as pool:
            try:
                started = [pool.submit(self._run, run) for run in missing]
                # With a time limit: a Ctrl-C that comes just before a wait does not end it.
                while wait(started, POLL_S, FIRST_EXCEPTION).not_done and not any(map(_has_failed, started)):
                    pass
                return all([future.result() for future in started])  # noqa: C419 - raises the first error
            except BaseException:
                # Stops the remaining runs, also after Ctrl-C. Otherwise the pool would wait for their own end.
                self._stop.set()
                raise

    def _has_ended(self, run: Run) -> bool:
        rows = self._results.rows(run.fingerprint)
        return bool(rows) and not (self._retry_failed and rows[-1]["status"] == FAILED)

    def _run(self, run: Run) -> bool:
        if self._is_over():
            return False
        with self._writing:  # Another command may have done this run meanwhile.
            self._results.read_again()
            if self._has_ended(run):
                return True
        with self._preparing:  # One at a time: torch has one random generator.
            prepared = self._prepare(run)
        place = self._places.get()
        try:
            ending = self._ending(run, self._words(run, prepared), place)
        finally:
            self._places.put(place)
        if ending is None:
            self._say(f"{run.name}: interrupted; the next call resumes it")
            return False
        folder = self._folder / run.name
        rows = rows_of_run(folder, ending)
        with self._writing:
            self._results.add(run, rows, self._parallel, datetime.date.today())
        self._say(_line(run, rows[-1], ending))
        if not self._keep and rows[-1]["status"] != FAILED:
            shutil.rmtree(folder)
        return True

    def _words(self, run: Run, prepared: PreparedRung | None) -> list[str]:
        words = [f"run.dir={self._folder}", f"run.name={run.name}", f"run.seed={run.seed}"]
        if prepared is None:
            return [*words, *overrides(run.settings, str(run.settings[MODEL_PATH]))]
        made = f"model.path={prepared.model}", f"data.train={prepared.train}", f"data.eval={prepared.held_out}"
        return [*words, *made, *overrides(run.settings, str(prepared.model))]

    def _ending(self, run: Run, words: Sequence[str], place: Mapping[str, str]) -> Ending | None:
        """Do a run to its end, with `place` in its environment. None if it was interrupted."""
        console = self._folder / f"{run.name}.log"
        began = time.monotonic()
        # The run may still be stopping, if the command that started it was killed a moment ago.
        while owner_of(self._folder / run.name) is not None and time.monotonic() - began < STOP_S:
            if self._is_over():
                return None
            self._stop.wait(POLL_S)
        # Only now, since an owner that ends before it has started anything removes its folders.
        self._folder.mkdir(parents=True, exist_ok=True)
        console.unlink(missing_ok=True)
        began = time.monotonic()
        process = start_child([*self._command, *words], console, {**THREADS, **place}, near_gpus=False)
        while (used := _processor_seconds(process)) is None:
            if self._is_over():
                _end(process)
                return None
            if time.monotonic() - began > self._limit_s:
                _end(process)
                return Ending(1, f"it took longer than {self._limit_s:g} s", time.monotonic() - began, None)
            self._stop.wait(POLL_S)
        if process.returncode in CUT_SHORT:
            return None
        written = console.read_text(errors="replace")
        if process.returncode == 0:
            console.unlink()
        return Ending(process.returncode, written.strip()[-LAST_WORDS:], time.monotonic() - began, used)

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._time_is_over()


def _has_failed(future: Future[bool]) -> bool:
    return future.done() and future.exception() is not None


def _processor_seconds(process: subprocess.Popen[bytes]) -> float | None:
    """The processor seconds of an ended process and its children. None while it runs."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _line(run: Run, last: Row, ending: Ending) -> str:
    accuracy = last.get("accuracy")
    known = "no accuracy" if accuracy is None else f"accuracy {accuracy:.2f}"
    return f"{run.name}: {last['status']} after {ending.seconds:.0f} s, {known} {last['reason']}".rstrip()
