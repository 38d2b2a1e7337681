from __future__ import annotations

import gc
import signal
import subprocess
import sys

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


TWO_CTRL_C = """
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


def after_two_ctrl_c(later: float) -> tuple[int, str]:
    """The status and the output of a process with two Ctrl-C, the second `later` times AGAIN_S after the first."""
    command = [sys.executable, "-c", TWO_CTRL_C.format(later=later)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in ("ready", "stopping"):
                assert process.stdout.readline().strip() == line
                process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=GENEROUS_S)
        finally:
            process.kill()
    return process.returncode, output


def test_a_second_ctrl_c_ends_the_process_at_once_with_one_line() -> None:
    assert after_two_ctrl_c(later=1.0) == (130, "asyncrl: ended at once on a second Ctrl-C\n")


def test_a_ctrl_c_that_arrives_twice_at_once_stops_the_process_cleanly() -> None:
    assert after_two_ctrl_c(later=0.9) == (0, "stopped cleanly\n")
