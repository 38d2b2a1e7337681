"""The tools of an episode: limits, retries, refusals, release."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import MalformedCall, parse_turn
from asyncrl.errors import ToolError
from asyncrl.tools import Tool, ToolRefusal
from asyncrl.tools.toolbox import OpenTools, Toolbox, ToolCounts, ToolLimits
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket, make_tool
from tests.helpers import GENEROUS_S

UNKNOWN = '<tool_call>{"name": "dig", "arguments": {}}</tool_call>'
LIMITS = ToolLimits(timeout_s=GENEROUS_S, retries=2, max_chars=100)


def echo(text: str, name: str = "echo") -> ToolCall:
    return ToolCall(name, {"text": text})


def use(
    classes: type[Tool] | list[type[Tool]],
    act: Callable[[OpenTools], Awaitable[Any]],
    limits: ToolLimits = LIMITS,
    **task: Any,
) -> tuple[Any, Toolbox]:
    """Open the tools and call `act`. Returns its result."""
    listed = classes if isinstance(classes, list) else [classes]
    toolbox = Toolbox({str(cls.schema["name"]): cls for cls in listed}, limits)

    async def main() -> Any:
        async with toolbox.open(make_ticket(**task)) as tools:
            return await act(tools)

    return asyncio.run(main()), toolbox


def failing(times: int, error: BaseException) -> Callable[[str], Awaitable[str]]:
    """Fails so many times, then answers."""
    left = [error] * times

    async def answer(text: str) -> str:
        if left:
            raise left.pop()
        return text

    return answer


async def never(text: str) -> str:
    await asyncio.Event().wait()
    return text


async def number(text: str) -> str:
    return 5  # type: ignore[return-value]


def test_a_failing_tool_is_tried_again():
    cls, log = make_tool(failing(2, OSError("down")))
    answers, toolbox = use(cls, lambda tools: tools.answer([echo("a")]))
    assert answers == ["a"]
    assert log.executed == ["a"] * 3
    assert (toolbox.counts.calls, toolbox.counts.failures) == (1, 2)


@pytest.mark.parametrize(
    ("answer", "timeout_s", "tries", "reason"),
    [
        (failing(99, SystemExit(3)), 5.0, 3, "at last with EscapeError: it tried to end the program: SystemExit: 3"),
        (failing(99, asyncio.CancelledError()), 5.0, 3, "it raised CancelledError, or cancelled its own task"),
        (failing(99, OSError("down")), 5.0, 3, "tool echo: `execute` failed 3 times, at last with OSError: down"),
        (never, 0.01, 3, r"it took longer than actor\.tool_timeout_s=0\.01 s \(\S*test_toolbox\.py, line \d+\)"),
        (number, 5.0, 1, "answered with int"),
    ],
)
def test_a_tool_that_fails_too_often_or_gives_no_text_fails_the_episode_and_is_released_once(
    answer: Callable[[str], Awaitable[str]], timeout_s: float, tries: int, reason: str
):
    cls, log = make_tool(answer)
    with pytest.raises(ToolError, match=reason):
        use(cls, lambda tools: tools.answer([echo("a")]), replace(LIMITS, timeout_s=timeout_s))
    assert (len(log.executed), log.released) == (tries, 1)


def test_a_refusal_and_a_malformed_call_are_texts_for_the_policy():
    cls, log = make_tool(failing(1, ToolRefusal("Error: not so.")))
    malformed = [MalformedCall("Error: no JSON."), *parse_turn(UNKNOWN, {}, FORMATS["hermes"]).calls]
    answers, toolbox = use(cls, lambda tools: tools.answer([echo("a"), *malformed]))
    assert answers == ["Error: not so.", "Error: no JSON.", "Error: there is no tool 'dig'; there are: ."]
    assert log.executed == ["a"]
    assert toolbox.counts == ToolCounts(calls=3, refused=1, malformed=1, unknown=1)


def test_calls_run_at_the_same_time_and_are_answered_in_their_order():
    everyone = asyncio.Barrier(3)

    async def answer(text: str) -> str:
        await everyone.wait()
        return text

    calls = [echo("c"), echo("a"), echo("b")]
    assert use(make_tool(answer)[0], lambda tools: tools.answer(calls))[0] == ["c", "a", "b"]


def test_a_long_result_is_cut_and_half_a_surrogate_pair_reaches_no_tokenizer():
    answers, _ = use(make_tool()[0], lambda tools: tools.answer([echo("x" * 1000), echo("a\ud800")]))
    assert (answers[0].count("x"), answers[1]) == (100, "a?")


def test_each_tool_is_created_with_its_own_kwargs():
    (plain, first), (verl, second), (none, third) = make_tool(), make_tool(name="verl"), make_tool(name="none")
    kwargs = {"echo": {"a": 1}, "verl": {"create_kwargs": {"b": 2}}, "none": None, "other": {"c": 3}}

    async def nothing(tools: OpenTools) -> None: ...

    use([plain, verl, none], nothing, tools_kwargs=kwargs)
    assert (first.created, second.created, third.created) == ([{"a": 1}], [{"b": 2}], [{}])


def test_every_tool_is_released_once_where_one_cannot_be_created_or_released():
    (bad, bad_log), (good, good_log) = make_tool(fail_create=True), make_tool(name="good", fail_release=True)
    with pytest.raises(ToolError, match="`create` failed 3 times"):
        use([good, bad], lambda tools: tools.answer([]))
    assert (bad_log.released, good_log.released) == (1, 1)


def test_every_tool_is_released_though_the_release_of_another_one_would_end_the_program():
    class Ending(make_tool()[0]):  # type: ignore[misc]
        async def release(self) -> None:
            raise GeneratorExit

    good, log = make_tool(name="good")

    async def nothing(tools: OpenTools) -> None: ...

    use([Ending, good], nothing)
    assert log.released == 1


async def test_tools_are_released_to_the_end_when_the_episode_is_cancelled():
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(make_tool()[0]):  # type: ignore[misc]
        async def release(self) -> None:
            begun.set()
            await may_end.wait()
            ended.set()

    async def episode() -> None:
        async with Toolbox({"echo": Slow}, LIMITS).open(make_ticket()):
            pass

    task = asyncio.create_task(episode())
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_rewards_are_those_of_the_tools_that_were_used():
    (used, _), (unused, _) = make_tool(reward=0.5), make_tool(name="unused", reward=1.0)

    async def act(tools: OpenTools) -> dict[str, float]:
        await tools.answer([echo("a"), echo("b")])
        return await tools.rewards()

    assert use([used, unused], act)[0] == {"echo": 0.5}
    with pytest.raises(ToolError, match="the reward of tool echo is nan"):
        use(make_tool(reward=math.nan)[0], act)


def test_a_task_may_bring_its_own_schemas_and_so_choose_the_tools():
    (echo_cls, _), (other, other_log) = make_tool(), make_tool(name="other")
    own = {"name": "echo", "description": "in this task's words", "parameters": {}}

    async def shown(tools: OpenTools) -> Any:
        return tools.shown

    for schema in (own, {"type": "function", "function": own}):
        assert use([echo_cls, other], shown, tools=[schema])[0] == [{"type": "function", "function": own}]
    assert other_log.created == []
    with pytest.raises(ToolError, match=r"offers search; add it to actor\.tools"):
        use(echo_cls, shown, tools=[{"name": "search"}])


def test_a_task_selects_among_the_tools_as_in_verls_data():
    (echo_cls, _), (other, other_log) = make_tool(), make_tool(name="other")

    async def names(tools: OpenTools) -> list[str]:
        return list(tools.functions)

    def shown(selection: Any, **task: Any) -> list[str]:
        return use([echo_cls, other], names, extra_info={"tool_selection": selection}, **task)[0]

    assert shown(["echo"]) == shown(["echo"], tools=[{"name": "echo"}, {"name": "other"}]) == ["echo"]
    assert other_log.created == []
    assert shown(["other", "echo", "other"]) == ["other", "echo"]
    assert shown([]) == shown(None) == ["echo", "other"]
    with pytest.raises(ToolError, match=r"tool_selection of task .* names search; leave it out there, or add it to"):
        shown(["echo", "search"])
    with pytest.raises(ToolError, match="is 'echo'; it must be a list of names of tools"):
        shown("echo")


@pytest.mark.parametrize(
    ("entry", "useless"),
    [
        ({"execute_kwargs": {"a": 1}}, "execute_kwargs"),
        (
            {"create_kwargs": {}, "calc_reward_kwargs": {"a": 1}, "release_kwargs": {"a": 1}},
            "calc_reward_kwargs, release_kwargs",
        ),
        ({"create_kwargs": {}, "other": 1}, "other"),
    ],
)
def test_arguments_that_no_method_takes_are_refused(entry: dict[str, Any], useless: str):
    cls, _ = make_tool(failing(0, OSError()))
    with pytest.raises(ToolError, match=rf"tools_kwargs\.echo: {useless} has no effect on this tool; leave it out"):
        use(cls, lambda tools: tools.answer([]), extra_info={"tools_kwargs": {"echo": entry}})


def test_empty_arguments_of_other_methods_are_taken():
    cls, _ = make_tool(failing(0, OSError()))
    entry = {"create_kwargs": None, "execute_kwargs": {}, "calc_reward_kwargs": None, "release_kwargs": {}}
    answers, _ = use(cls, lambda tools: tools.answer([echo("a")]), extra_info={"tools_kwargs": {"echo": entry}})
    assert answers == ["a"]
