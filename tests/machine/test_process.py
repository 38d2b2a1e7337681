from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest

from asyncrl.machine.process import event_on, freeze_heap
from tests.helpers import GENEROUS_S


def test_a_collection_looks_at_no_object_from_before_and_still_frees_cycles_made_after() -> None:
    loaded: list[object] = []
    freeze_heap()
    made: list[object] = []
    made.append(made)
    seen = {id(each) for each in gc.get_objects()}
    assert id(loaded) not in seen
    assert id(made) in seen
    del made
    assert gc.collect() > 0


def test_a_signal_sets_its_event_also_while_the_main_thread_begins_to_wait_for_it() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    event = event_on(signal.SIGUSR2)
    try:
        with event._cond:  # as within `event.wait`
            signal.raise_signal(signal.SIGUSR2)
        assert event.wait(GENEROUS_S)
    finally:
        signal.signal(signal.SIGUSR2, before)


TWO_SIGNALS = """
import threading
from asyncrl.machine.process import AGAIN_S, stop_on_signals
times, twice = iter([0.0, AGAIN_S * {later}]), threading.Event()

def now():
    time = next(times)
    if time:
        threading.Thread(target=twice.set).start()
    return time

def wait_for(event):
    # In short pieces: the handler of a signal that comes just before a wait runs only after the wait.
    while not event.wait(0.05):
        pass

stop = stop_on_signals(now)
print("ready", flush=True)
wait_for(stop)
print("stopping", flush=True)
wait_for(twice)
print("stopped cleanly", flush=True)
"""


def after_ctrl_c(
    later: float, first: signal.Signals = signal.SIGINT, errors: int = subprocess.STDOUT
) -> tuple[int, str]:
    """The status and the output of a process with a Ctrl-C `later` times AGAIN_S after the signal `first`. Its standard
    error goes to the file `errors`."""
    command = [sys.executable, "-c", TWO_SIGNALS.format(later=later)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        try:
            for line, number in (("ready", first), ("stopping", signal.SIGINT)):
                assert process.stdout.readline().strip() == line
                process.send_signal(number)
            output, _ = process.communicate(timeout=GENEROUS_S)
        finally:
            process.kill()
    return process.returncode, output


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_ctrl_c_ends_a_process_that_is_stopping_at_once_with_one_line(first: signal.Signals) -> None:
    assert after_ctrl_c(1.0, first) == (130, "asyncrl: ended at once on Ctrl-C, while it was stopping\n")


def test_a_second_ctrl_c_ends_the_process_also_if_nobody_reads_its_last_line() -> None:
    unread, errors = os.pipe()
    os.close(unread)
    try:
        assert after_ctrl_c(1.0, errors=errors) == (130, "")
    finally:
        os.close(errors)


def test_a_ctrl_c_that_arrives_twice_at_once_stops_the_process_cleanly() -> None:
    assert after_ctrl_c(0.9) == (0, "stopped cleanly\n")


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("2,4", 2), ("", 1)])
def test_torch_has_the_threads_of_the_outermost_level_in_the_variable(variable: str, threads: int) -> None:
    """OpenMP takes one number for each level of nested regions."""
    code = "from asyncrl.machine.process import limit_threads; limit_threads(None); import torch; "
    command = [sys.executable, "-c", code + "print(torch.get_num_threads())"]
    environment = {**os.environ, "OMP_NUM_THREADS": variable}
    assert int(subprocess.check_output(command, env=environment)) == threads
