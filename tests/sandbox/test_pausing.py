"""The rule by which a session has run in a pause, on a folder of processes as the kernel writes it, and a clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.sandbox.child.pausing import LONGEST_LOOK_S, LOOK_S, MOST_RUNS, PF_EXITING, Pause, descendants

NOBODY = 1 << 23
"""Above all ids of processes that Linux gives: signals to it and its followers reach nothing."""


class FakeProc:
    """A folder like /proc with this process, and below it one that this test describes."""

    def __init__(self, folder: Path, counts_well: bool = True) -> None:
        self.folder = folder
        self.seconds = 0.0
        self._counts_well = counts_well
        (folder / "thread-self").mkdir()
        (folder / "thread-self" / "children").touch()
        self.put(os.getpid(), 1)
        self.put(NOBODY, os.getpid())

    def put(self, pid: int, parent: int, state: str = "T", ran: int = 1, flags: int = 0) -> None:
        """A process with one thread, which has run for so many hundredths of a second."""
        stat = f"{pid} (a) b) {state} {parent} 0 0 0 0 {flags} 0 0 0 0 {ran} 0 0 0\n"
        well = f"{ran * 10**7} 5 {ran}\n" if self._counts_well else "0 0 0\n"
        thread = self.folder / str(pid) / "task" / str(pid)
        thread.mkdir(parents=True, exist_ok=True)
        for file, text in (("stat", stat), ("schedstat", well), ("children", "")):
            (thread / file).write_text(text)
        (thread.parents[1] / "stat").write_text(stat)
        children = self.folder / str(parent) / "task" / str(parent) / "children"
        if children.exists():
            children.write_text(" ".join({*children.read_text().split(), str(pid)}))

    def remove(self, pid: int, parent: int) -> None:
        """The process has ended, and its parent knows it."""
        children = self.folder / str(parent) / "task" / str(parent) / "children"
        children.write_text(" ".join(each for each in children.read_text().split() if each != str(pid)))

    def start(self) -> Pause:
        return Pause(str(self.folder), lambda: self.seconds)

    def look(self, pause: Pause) -> bool:
        """The next look, when its time has come."""
        assert not pause.look()
        self.seconds += pause.wait_s + 1e-6
        return pause.look()


@pytest.fixture(params=[True, False], ids=["nanoseconds", "hundredths"])
def proc(request: pytest.FixtureRequest, tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path, bool(request.param))


def test_a_process_that_runs_after_all_have_stopped_breaks_the_pause_at_once(proc: FakeProc):
    pause = proc.start()
    assert not proc.look(pause)
    proc.put(NOBODY, os.getpid(), ran=2)
    assert proc.look(pause)
    assert pause.is_broken


def test_a_new_process_breaks_the_pause_and_one_that_has_disappeared_does_not(proc: FakeProc):
    pause = proc.start()
    proc.look(pause)
    proc.remove(NOBODY, os.getpid())
    assert not proc.look(pause)
    assert not pause.is_broken
    proc.put(NOBODY + 1, os.getpid())
    assert proc.look(pause)
    assert pause.is_broken


@pytest.mark.parametrize("leaves", ["a zombie", "nothing"])
def test_processes_that_end_one_after_another_in_a_pause_break_it(proc: FakeProc, leaves: str):
    started = range(NOBODY + 1, NOBODY + MOST_RUNS + 2)
    for pid in started:
        proc.put(pid, os.getpid())
    pause = proc.start()
    proc.look(pause)
    for pid in started:
        assert not pause.is_broken
        if leaves == "a zombie":
            proc.put(pid, os.getpid(), "Z", ran=30, flags=PF_EXITING)
        else:
            proc.remove(pid, os.getpid())
        assert not proc.look(pause)
    assert pause.is_broken


def test_a_process_that_the_kernel_ends_slowly_in_a_pause_does_not_break_it(proc: FakeProc):
    pause = proc.start()
    proc.look(pause)
    for look in range(3 * MOST_RUNS):
        proc.put(NOBODY, os.getpid(), "R", ran=2 + look, flags=PF_EXITING)
        assert not proc.look(pause)
    proc.remove(NOBODY, os.getpid())
    assert not proc.look(pause)
    assert not pause.is_broken


def test_processes_may_run_at_a_few_looks_before_all_have_stopped(proc: FakeProc):
    pause = proc.start()
    for look in range(1, MOST_RUNS + 1):
        proc.put(NOBODY, os.getpid(), "R", ran=1 + look)
        assert proc.look(pause)
        assert pause.wait_s == pytest.approx(LOOK_S)
    assert not pause.is_broken
    proc.put(NOBODY, os.getpid(), "R", ran=99)
    assert proc.look(pause)
    assert pause.is_broken


def test_to_wait_for_a_processor_or_a_disk_is_not_to_run(proc: FakeProc):
    pause = proc.start()
    for state in "RRRRRRRRDDDDDDDD":
        proc.put(NOBODY, os.getpid(), state)
        assert not proc.look(pause)
    proc.put(NOBODY, os.getpid(), "T", ran=2)
    assert proc.look(pause)
    assert not pause.is_broken


def test_a_process_that_gives_back_its_memory_when_it_ends_does_not_run(proc: FakeProc):
    pause = proc.start()
    for look in range(3 * MOST_RUNS):
        proc.put(NOBODY, os.getpid(), "R", ran=1 + look, flags=PF_EXITING | 1)
        assert not proc.look(pause)
    proc.put(NOBODY, os.getpid(), "Z", ran=99, flags=PF_EXITING)
    assert not proc.look(pause)
    assert not pause.is_broken


def test_looks_become_rarer_once_all_have_stopped(proc: FakeProc):
    pause = proc.start()
    waits = []
    for _ in range(6):
        waits.append(pause.wait_s)
        proc.look(pause)
    assert waits == pytest.approx([LOOK_S, LOOK_S, 2 * LOOK_S, 4 * LOOK_S, LONGEST_LOOK_S, LONGEST_LOOK_S])


def test_a_kernel_without_files_of_children_shows_the_same_processes(proc: FakeProc):
    proc.put(NOBODY + 1, NOBODY)
    proc.put(NOBODY + 2, 1)
    expected = {NOBODY, NOBODY + 1}
    assert descendants(str(proc.folder)) == expected
    (proc.folder / "thread-self" / "children").unlink()
    assert descendants(str(proc.folder)) == expected
