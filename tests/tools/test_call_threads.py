"""Threads for synchronous code of users: a call that hangs costs only its own thread."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import subprocess
import sys
import threading

import pytest

from asyncrl.tools import call_threads
from asyncrl.tools.call_threads import CallThreads, open_to_users
from asyncrl.tools.contained import EscapeError
from tests.helpers import async_until


async def given_up(threads: CallThreads, release: threading.Event) -> None:
    """Let a time limit end a call that waits for `release`."""
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()

    task = asyncio.create_task(threads.call(hang))
    await async_until(begun.is_set)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_calls_that_hang_are_counted_and_named_and_block_no_other_call(caplog: pytest.LogCaptureFixture):
    threads, release = CallThreads("the tool slow"), threading.Event()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            await given_up(threads, release)
    assert threads.stuck == 40
    assert await threads.call(lambda: "answer") == "answer"
    assert "a call of the tool slow was given up, and its thread still runs: " in caplog.text
    assert re.search(r"still runs: \S*test_call_threads\.py, line \d+ \(threads that still run: 1\)", caplog.text)
    release.set()
    await async_until(lambda: threads.stuck == 0)


async def test_too_many_calls_that_hang_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_threads, "MAX_STUCK", 1)
    threads, release = CallThreads("the tool slow"), threading.Event()
    await given_up(threads, release)
    with pytest.raises(RuntimeError, match="1 calls of the tool slow have not returned; find out what they wait for"):
        await threads.call(lambda: "answer")
    release.set()


async def test_a_call_sees_the_context_variables_of_its_caller():
    variable = contextvars.ContextVar("variable", default="")
    variable.set("set")
    assert await CallThreads("tools").call(variable.get) == "set"


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("down"), OSError), (SystemExit(3), EscapeError), (StopIteration(), RuntimeError)]
)
async def test_errors_of_a_call_reach_its_caller(error: BaseException, raised: type[Exception]):
    def fail() -> None:
        raise error

    with pytest.raises(raised):
        await CallThreads("tools").call(fail)


@pytest.mark.slow
def test_a_program_ends_although_a_call_hangs_and_waits_for_calls_that_do_not():
    program = (
        "import asyncio, threading, time\n"
        "from asyncrl.tools.call_threads import open_to_users\n"
        "async def main():\n"
        "    threads = open_to_users(asyncio.get_running_loop(), 'a tool')\n"
        "    hung = asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))\n"
        "    begun = threading.Event()\n"
        "    def work(): begun.set(); time.sleep(0.1); print('worked')\n"
        "    asyncio.get_running_loop().run_in_executor(None, work)\n"
        "    await asyncio.to_thread(begun.wait)\n"
        "    hung.cancel()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "worked\n"), ended.stderr


def test_to_thread_of_an_event_loop_for_users_code_starts_a_thread_for_each_call():
    async def main() -> int:
        threads = open_to_users(asyncio.get_running_loop(), "a tool")
        everyone = threading.Barrier(50)
        await asyncio.gather(*(asyncio.to_thread(everyone.wait) for _ in range(50)))
        return threads.stuck

    assert asyncio.run(main()) == 0
