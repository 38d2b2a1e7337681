"""The tool `python_session` as an episode uses it, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import ToolError
from asyncrl.sandbox import sandbox
from asyncrl.tools.python_session import LOST
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.sessions import MemoryBudget
from asyncrl.tools.toolbox import OpenTools, Toolbox, ToolLimits
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket
from tests.helpers import GENEROUS_S, async_until, child_with, living, until
from tests.sandbox.waking import WAKING


def python(code: str) -> ToolCall:
    return ToolCall("python", {"code": code})


def playing(act: Callable[[Toolbox], Awaitable[None]], **sandbox: Any) -> Toolbox:
    actor = ActorConfig(tools=["python_session"], sandbox=SandboxConfig(**sandbox))
    toolbox = Toolbox(tool_classes(actor), ToolLimits(0.5, 1))

    async def main() -> None:
        try:
            await act(toolbox)
        finally:
            await toolbox.close()

    asyncio.run(main())
    return toolbox


def episode(act: Callable[[OpenTools], Awaitable[None]], **limits: Any) -> Toolbox:
    async def alone(toolbox: Toolbox) -> None:
        kwargs = {"wall_s": GENEROUS_S, **limits}
        async with toolbox.open(make_ticket(tools_kwargs={"python": kwargs})) as tools:
            await act(tools)

    return playing(alone)


@pytest.mark.slow
def test_an_episode_has_one_session_and_calls_of_a_turn_run_in_their_order():
    async def act(tools: OpenTools) -> None:
        calls = [python("x = [1]"), python("x.append(2)"), python("x"), python("1 / 0")]
        *first, error = await tools.answer(calls)
        assert first == ["(no output)", "(no output)", "[1, 2]"]
        assert "ZeroDivisionError" in str(error)
        assert await tools.answer([python("print('é'); len(x)")]) == ["é\n2"]

    counters = episode(act).counters()
    assert (counters["python_started"], counters["python_open"], counters["tool_failures"]) == (1, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "note", "counter"),
    [
        ("print('begun'); import time; time.sleep(600)", "Error: stopped after 4 s.", "late"),
        ("print('begun'); import os; os._exit(3)", "Error: the program ended with status 3.", "ended"),
        ("print('begun'); import os; os._exit(0)", "Error: the program ended with status 1.", "ended"),
        (
            "print('begun'); import os; os.kill(os.getpid(), 9)",
            "Error: stopped because of too little memory or too many processes.",
            "ended",
        ),
    ],
)
def test_a_call_that_ends_the_session_says_so_and_the_next_has_a_new_one(code: str, note: str, counter: str):
    async def act(tools: OpenTools) -> None:
        await tools.answer([python("x = 1")])
        assert await tools.answer([python(code)]) == [f"begun\n{note}\n{LOST}"]
        (answer,) = await tools.answer([python("x")])
        assert "NameError" in str(answer)

    counters = episode(act, wall_s=4.0 if counter == "late" else GENEROUS_S).counters()
    assert (counters["python_started"], counters[f"python_{counter}"], counters["tool_failures"]) == (2, 1, 0)


@pytest.mark.slow
def test_a_session_that_runs_between_two_calls_is_ended_which_the_policy_reads_and_a_counter_counts():
    async def act(tools: OpenTools) -> None:
        await tools.answer([python(WAKING["by a timer"])])
        server = child_with("sandbox.child")
        await async_until(lambda: not living(server.children(recursive=True)))
        reason = "Error: the session was ended because its processes ran between two calls."
        assert await tools.answer([python("1")]) == [f"{reason}\n{LOST}"]
        assert await tools.answer([python("1")]) == ["1"]

    counters = episode(act).counters()
    assert (counters["python_ran_in_pause"], counters["python_ended"], counters["python_started"]) == (1, 0, 2)
    assert counters["tool_failures"] == 0


@pytest.mark.slow
@pytest.mark.skipif(bool(sandbox.why_no_namespaces()), reason="a program without namespaces may do so itself")
def test_a_session_that_this_machine_ends_fails_its_episode_and_is_no_answer():
    async def act(toolbox: Toolbox) -> None:
        async with toolbox.open(make_ticket()) as tools:
            await tools.answer([python("x = 1")])
            for process in psutil.Process().children(recursive=True):
                # One may end with another.
                with suppress(psutil.Error):
                    if "sandbox.child" in " ".join(process.cmdline()):
                        process.kill()
            with pytest.raises(ToolError, match="the session was lost"):
                await tools.answer([python("x")])

    counters = playing(act).counters()
    assert (counters["python_states_lost"], counters["tool_failures"]) == (1, 1)


@pytest.mark.slow
def test_episodes_whose_sessions_do_not_fit_into_the_memory_wait_for_others():
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def first(toolbox: Toolbox) -> None:
        async with toolbox.open(make_ticket("t1")) as tools:
            await tools.answer([python("1")])
            begun.set()
            await go_on.wait()

    async def second(toolbox: Toolbox) -> None:
        await begun.wait()
        async with toolbox.open(make_ticket("t2")) as tools:
            assert await tools.answer([python("2")]) == ["2"]

    async def act(toolbox: Toolbox) -> None:
        both = asyncio.gather(first(toolbox), second(toolbox))
        async with asyncio.timeout(GENEROUS_S):
            while toolbox.counters()["python_waiting"] < 1:
                await asyncio.sleep(0.01)
        assert toolbox.counters()["python_open"] == 1
        go_on.set()
        await both

    assert playing(act, memory_mb=1500).counters()["python_started"] == 2


def test_a_session_that_fits_into_no_budget_is_refused():
    async def act(toolbox: Toolbox) -> None:
        with pytest.raises(ToolError, match=r"memory_mb=4096 is more than actor\.sandbox\.memory_mb=2048"):
            async with toolbox.open(make_ticket(tools_kwargs={"python": {"memory_mb": 4096}})):
                pass

    playing(act, memory_mb=2048)


def test_a_budget_serves_in_order_and_forgets_those_that_go():
    async def main() -> None:
        budget, served = MemoryBudget(10), list[str]()

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            served.append(name)

        tasks = [asyncio.create_task(take(*each)) for each in (("a", 6), ("b", 8), ("c", 2), ("d", 4))]
        await asyncio.sleep(0)
        assert served == ["a"]
        tasks[1].cancel()
        await asyncio.wait([tasks[1], tasks[2]])
        assert served == ["a", "c"]
        budget.give(2)
        await tasks[3]
        budget.give(6)
        budget.give(4)
        await budget.take(10)
        cancelled = asyncio.create_task(budget.take(10))
        await asyncio.sleep(0)
        cancelled.cancel()
        budget.give(10)
        await budget.take(10)
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()

    asyncio.run(asyncio.wait_for(main(), GENEROUS_S))


@pytest.mark.slow
def test_nothing_outlives_an_episode_that_is_cancelled_or_an_actor_that_is_killed():
    mark = f"of-an-episode-{os.getpid()}"
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)", mark]
    start = f"import subprocess, time; subprocess.Popen({sleeper!r}, start_new_session=True)"

    # The launcher, the watcher, which without namespaces is the same, the program, and the sleeper.
    expected = 3 if sandbox.why_no_namespaces() else 4

    def of_session(caller: psutil.Process) -> list[psutil.Process]:
        """The processes of the session, once the sleeper carries its mark."""
        with suppress(psutil.NoSuchProcess):  # One that the start needs may end meanwhile.
            found = [each for server in caller.children() for each in server.children(recursive=True)]
            return found if any(mark in each.cmdline()[-1:] for each in living(found)) else []
        return []

    async def act(toolbox: Toolbox) -> None:
        async def play() -> None:
            async with toolbox.open(make_ticket()) as tools:
                await tools.answer([python(f"{start}; time.sleep(600)")])

        playing = asyncio.create_task(play())
        started = await async_until(lambda: of_session(psutil.Process()))
        assert len(started) == expected
        playing.cancel()
        await asyncio.wait([playing])
        # A busy kernel ends a killed process a moment after the signal.
        await async_until(lambda: not living(started))

    playing(act)
    program = f"""
import tests.tools.test_python_session as own
async def act(toolbox):
    async with toolbox.open(own.make_ticket()) as tools:
        print(await tools.answer([own.python({start!r})]), flush=True)
        await tools.answer([own.python("while True: pass")])
own.playing(act)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        assert "Popen" in actor.stdout.readline()
        started = until(lambda: of_session(psutil.Process(actor.pid)))
        assert len(started) == expected
        started += psutil.Process(actor.pid).children(recursive=True)
        actor.send_signal(signal.SIGKILL)
    until(lambda: not living(started))
