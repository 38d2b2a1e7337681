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


def test_a_second_ctrl_c_ends_the_process_at_once_with_one_line() -> None:
    code = (
        "import time\nfrom asyncrl.machine.process import stop_on_signals\nstop = stop_on_signals()\n"
        "try:\n    print('ready', flush=True)\n    stop.wait()\n    print('stopping', flush=True)\n"
        "    time.sleep(600)\nfinally:\n    time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("ready", "stopping"):
            assert process.stdout.readline().strip() == line
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GENEROUS_S)
    assert (process.returncode, errors) == (130, "asyncrl: ended at once on a second Ctrl-C\n")
