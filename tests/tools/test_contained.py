"""Exceptions of users' code that would end the actor: which become an EscapeError, and which pass."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.machine.finishing import finish
from asyncrl.tools.contained import EscapeError, contained, guarded_task


class TimedOut(BaseException):
    """Like the timeouts of func_timeout and the failures of pytest, no Exception."""


def raising(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "it tried to end the program: SystemExit: 3"),
        (KeyboardInterrupt(), "it tried to end the program: KeyboardInterrupt"),
        (GeneratorExit(), "it raised an exception that is not an Exception: GeneratorExit"),
        (TimedOut("late"), "it raised an exception that is not an Exception: TimedOut: late"),
        (BaseExceptionGroup("all", [TimedOut("late")]), "it raised an exception that is not an Exception: BaseExc"),
        (asyncio.CancelledError(), "it raised CancelledError, or cancelled its own task"),
    ],
)
def test_an_exception_that_would_end_more_than_its_task_becomes_an_escape_error(error: BaseException, reason: str):
    async def main() -> None:
        with pytest.raises(EscapeError, match=reason) as raised:
            await contained(raising(error))
        assert raised.value.__cause__ is error

    asyncio.run(main())


async def test_results_and_other_exceptions_pass():
    assert await contained(lambda: asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(OSError, match="down"):
        await contained(raising(OSError("down")))


@pytest.mark.parametrize("ignores", [False, True])
async def test_code_that_cancels_its_own_task_does_not_cancel_its_caller(ignores: bool):
    async def call() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not ignores:
                raise
        return "answer"

    if ignores:
        assert await contained(call) == "answer"
    else:
        with pytest.raises(EscapeError):
            await contained(call)
    await asyncio.sleep(0)


@pytest.mark.parametrize("ignores", [False, True])
async def test_a_caller_that_is_cancelled_stops_even_if_the_code_ignores_it(ignores: bool):
    begun, ended = asyncio.Event(), []

    async def call() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not ignores:
                raise
        finally:
            ended.append("ended")

    task = asyncio.create_task(contained(call))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"]


async def test_a_time_limit_outside_ends_the_code_and_names_its_line():
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(0.01):
            await contained(asyncio.Event().wait)
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_users_code_starts_does_not_end_the_event_loop(error: BaseException):
    async def main() -> str:
        asyncio.get_running_loop().set_task_factory(guarded_task)
        with pytest.raises(EscapeError, match="it tried to end the program"):
            await contained(lambda: asyncio.gather(raising(error)()))
        return "goes on"

    assert asyncio.run(main()) == "goes on"


def test_ctrl_c_still_ends_a_program_in_which_it_raises_keyboard_interrupt():
    program = (
        "import asyncio, os, signal\n"
        "from asyncrl.tools.contained import contained\n"
        # A job in the background of a shell begins with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "async def call(): os.kill(os.getpid(), signal.SIGINT)\n"
        "asyncio.new_event_loop().run_until_complete(contained(call))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stderr.strip().endswith("KeyboardInterrupt")


async def test_work_is_finished_although_its_caller_is_cancelled_twice():
    may_end, ended = asyncio.Event(), []

    async def work() -> None:
        await may_end.wait()
        ended.append("ended")

    task = asyncio.create_task(finish(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"]
