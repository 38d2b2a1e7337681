"""A thread that works for another."""

from __future__ import annotations

import threading

import pytest

from asyncrl.replay.call_thread import CallThread


def test_a_call_is_made_in_the_other_thread_and_its_result_is_waited_for() -> None:
    go = threading.Event()

    def work(number: int) -> tuple[int, str]:
        go.wait()
        return number + 1, threading.current_thread().name

    with CallThread(work, "worker") as thread:
        thread.begin(1)
        assert thread.result(timeout_s=0.01) is None
        assert thread.busy
        go.set()
        assert thread.result() == (2, "worker")
        assert not thread.busy
        thread.begin(2)
    assert thread.result() == (3, "worker"), "the end of the block waits for the call that was under way"


def test_an_error_of_a_call_is_raised_where_its_result_is_taken_and_ends_nothing() -> None:
    with CallThread(int, "worker") as thread:
        thread.begin("seven")
        with pytest.raises(ValueError, match="seven"):
            thread.result()
        thread.begin("7")
        assert thread.result() == 7
