"""Tools written for verl play episodes as they are."""

from __future__ import annotations

import asyncio
import io
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError, ToolError
from asyncrl.launch.preflight.episodes.episode import OwnCode
from asyncrl.tools import Tool
from asyncrl.tools.environments.classes import may_reward_turns
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import ToolCall, Trajectory
from tests.episode.fakes import ScriptedEngine, call, make_ticket, make_tokenizer, play_with_tools
from tests.helpers import GENEROUS_S, async_until

DATA = Path(__file__).parents[3] / "data/verl"
WRITTEN_FOR_VERL = ("tests.data.verl.vault_tool", "tests.data.verl.old_tool")
VAULT = {"class_name": "tests.data.verl.vault_tool.VaultTool", "config": {"points": 0.5}}
OLD_SCHEMA = {"type": "function", "function": {"name": "old", "description": "Repeats a word."}}
OLD = {"class_name": "tests.data.verl.old_tool.OldTool", "config": {"type": "native"}, "tool_schema": OLD_SCHEMA}
FUNCTIONS = {"function_tool_path": str(DATA / "function_tools.py")}


@pytest.fixture(autouse=True)
def _without_verl() -> Iterator[None]:
    """Leave nothing of these tests in the process."""
    from asyncrl.compat.verl.tools import playing

    def forget() -> None:
        playing._made.cache_clear()
        for name in list(sys.modules):
            if name.partition(".")[0] == "verl" or name in WRITTEN_FOR_VERL:
                del sys.modules[name]

    forget()
    yield
    forget()


def classes(*entries: Any) -> dict[str, type[Tool]]:
    return tool_classes(ActorConfig(tools=[], verl_tools=list(entries)))


def play(tools: dict[str, type[Tool]], *turns: str, **tools_kwargs: Any) -> tuple[Trajectory, str]:
    """The trajectory, and its text."""
    tokenizer = make_tokenizer()
    ticket = make_ticket(extra_info={"tools_kwargs": tools_kwargs})
    trajectory = asyncio.run(play_with_tools(ScriptedEngine(tokenizer, list(turns)), Chat(tokenizer), tools, ticket))
    return trajectory, tokenizer.decode(trajectory.tokens.tolist())


def use(tools: dict[str, type[Tool]], *calls: ToolCall, **tools_kwargs: Any) -> list[Any]:
    """The answers to the calls of one turn."""
    toolbox = Toolbox(tools, ToolLimits(timeout_s=GENEROUS_S, retries=1))

    async def main() -> list[Any]:
        async with toolbox.open(make_ticket(extra_info={"tools_kwargs": tools_kwargs})) as opened:
            return await opened.answer(calls)

    return asyncio.run(main())


def test_a_tool_lives_once_in_an_episode_and_gets_the_arguments_of_each_method() -> None:
    tools = classes(VAULT)
    row = {
        "create_kwargs": {"code": "7"},
        "execute_kwargs": {"speed": 2},
        "calc_reward_kwargs": {"bonus": 0.125},
        "release_kwargs": {"lock": True},
    }
    trajectory, text = play(tools, call("6", "vault"), call("7", "vault"), "done", vault=row)
    vault: Any = tools["vault"].theirs  # type: ignore[attr-defined]
    assert vault.noted == [
        ("create", "t1", {"create_kwargs": {"code": "7"}, "code": "7"}),
        ("execute", "t1", {"speed": 2}),
        ("execute", "t1", {"speed": 2}),
        ("release", "t1", {"lock": True}),
    ]
    assert vault._instance_dict == {}
    assert "shut" in text
    assert "open after 2" in text
    assert dict(trajectory.rewards) == {"vault": 1.125}
    assert trajectory.turn_scores == [-0.25, 0.5]


def test_the_scores_of_several_calls_of_one_turn_are_added() -> None:
    turn = "\n".join(call(code, "vault") for code in ("7", "6", "5"))
    trajectory, _ = play(classes(VAULT), turn, "done", vault={"create_kwargs": {"code": "7"}})
    assert trajectory.turn_scores == [0.0]


def test_a_tool_of_an_early_release_gets_its_arguments_one_by_one_and_a_reward_that_is_no_number_is_none() -> None:
    tools = classes(OLD)
    row = {"create_kwargs": {"word": "ab"}, "execute_kwargs": {"times": 2}, "release_kwargs": {}}
    trajectory, text = play(tools, '<tool_call>\n{"name": "old", "arguments": {}}\n</tool_call>', "done", old=row)
    assert "abab" in text
    assert dict(trajectory.rewards) == {}
    assert trajectory.turn_scores == []


def test_functions_are_tools_and_only_a_score_that_they_return_is_a_score() -> None:
    tools = classes(FUNCTIONS, VAULT)
    assert list(tools) == ["judge", "shout", "vault"]
    assert tools["shout"].schema["parameters"]["properties"]["times"] == {
        "type": "integer",
        "description": "How often.",
    }
    turns = [call("hi", "shout"), call("good", "judge"), call("bad", "judge"), "done"]
    trajectory, text = play(tools, *turns, vault={"create_kwargs": {}})
    assert "HI" in text
    assert '{"said": "bad"}' in text
    assert trajectory.turn_scores == [0.5]
    assert dict(trajectory.rewards) == {}


def test_an_image_of_a_response_comes_before_its_text() -> None:
    [[image, text]] = use(classes(VAULT), ToolCall("vault", {"text": "photo"}), vault={"create_kwargs": {}})
    assert text == {"type": "text", "text": "a photo"}
    assert np.asarray(Image.open(io.BytesIO(image["image"]))).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("code", "reason"), [("broken", "OSError: the vault is broken"), ("film", "answered with a video")]
)
def test_a_tool_that_raises_is_retried_and_then_its_episode_fails(code: str, reason: str) -> None:
    with pytest.raises(ToolError, match=f"vault: `execute` failed .*{reason}"):
        use(classes(VAULT), ToolCall("vault", {"text": code}), vault={"create_kwargs": {}})


def test_a_failed_episode_is_released_and_so_is_one_whose_create_failed() -> None:
    tools = classes(VAULT)
    vault: Any = tools["vault"].theirs  # type: ignore[attr-defined]
    with pytest.raises(ToolError):
        use(tools, ToolCall("vault", {"text": "broken"}), vault={"create_kwargs": {}})
    assert vault._instance_dict == {}
    assert [what for what, *_ in vault.noted].count("release") == 1
    with pytest.raises(ToolError, match="`create` failed"):
        use(tools, vault={"create_kwargs": {"instance_id": []}})
    # A `create` that failed may have taken resources, under the id that it was offered.
    assert [(what, instance) for what, instance, _ in vault.noted][-1] == ("release", "t1")
    assert [what for what, *_ in vault.noted].count("release") == 2


def test_a_create_that_takes_too_long_is_released_and_a_tool_that_was_not_reached_is_not() -> None:
    tools = classes(VAULT, OLD)
    vault: Any = tools["vault"].theirs  # type: ignore[attr-defined]
    old: Any = tools["old"].theirs  # type: ignore[attr-defined]
    released: list[str] = []

    async def hang(instance_id: str, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    async def release(instance_id: str, **kwargs: Any) -> None:
        released.append(instance_id)

    async def never(instance_id: str, **kwargs: Any) -> None:
        raise AssertionError

    vault.create, vault.release, old.release = hang, release, never

    async def main() -> None:
        async with Toolbox(tools, ToolLimits(timeout_s=0.01, retries=1)).open(make_ticket()):
            pass

    with pytest.raises(ToolError, match="`create` failed 2 times, at last with TimeoutError"):
        asyncio.run(main())
    assert released == ["t1"]


def test_a_call_that_changes_its_kwargs_changes_them_for_no_other_call() -> None:
    tools = classes(VAULT)
    vault: Any = tools["vault"].theirs  # type: ignore[attr-defined]
    seen: list[list[str]] = []

    async def execute(instance_id: str, parameters: dict[str, Any], nested: list[str], **kwargs: Any) -> Any:
        seen.append([*nested])
        nested.append(parameters["text"])
        if len(seen) == 1:
            raise OSError("down")
        return "text", None, {}

    vault.execute = execute
    row = {"create_kwargs": {}, "execute_kwargs": {"nested": ["given"]}}
    use(tools, ToolCall("vault", {"text": "a"}), ToolCall("vault", {"text": "b"}), vault=row)
    assert seen == [["given"]] * 3
    assert row["execute_kwargs"] == {"nested": ["given"]}


def test_a_function_that_hangs_blocks_no_other_call_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    tools = classes(FUNCTIONS)
    may_end = threading.Event()
    tools["shout"].theirs.fn = lambda text: may_end.wait() if text == "hang" else text  # type: ignore[attr-defined]
    toolbox = Toolbox(tools, ToolLimits(timeout_s=0.01, retries=19))

    async def main() -> None:
        # The threads of asyncio would all hang by now.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with toolbox.open(make_ticket()) as opened:
            with pytest.raises(ToolError, match="TimeoutError"):
                await opened.answer([ToolCall("shout", {"text": "hang"})])
            assert toolbox.counters()["tool_stuck"] == 20
            assert await asyncio.to_thread(lambda: "free") == "free"
            may_end.set()
            await async_until(lambda: toolbox.counters()["tool_stuck"] == 0)

    asyncio.run(main())
    assert re.search(r"the function tool shout was given up, .*: \S*test_playing\.py, line \d+", caplog.text)


def test_a_process_makes_each_object_once() -> None:
    first, again = classes(VAULT, OLD), classes(VAULT)
    assert first["vault"].theirs is again["vault"].theirs  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["verl.tools.gsm8k_tool.Gsm8kTool", "asyncrl.compat.verl.tools.gsm8k.Gsm8kTool"])
def test_verls_example_of_gsm8k_comes_with_asyncrl(path: str) -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Scores an answer.",
            "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        },
    }
    tools = classes({"class_name": path, "config": {}, "tool_schema": schema})
    turns = [
        f'<tool_call>\n{{"name": "calc_gsm8k_reward", "arguments": {{"answer": "{answer}"}}}}\n</tool_call>'
        for answer in ("71", "72", "72")
    ]
    trajectory, text = play(tools, *turns, "72", calc_gsm8k_reward={"create_kwargs": {"ground_truth": "72"}})
    assert "Current parsed answer='71' reward=0.0" in text
    assert trajectory.turn_scores == pytest.approx([-0.05, 0.0, -0.05])
    assert dict(trajectory.rewards) == {"calc_gsm8k_reward": 1.0}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("vault", "each entry must be"),
        ({**VAULT, "name": "x"}, "each entry must be"),
        (
            {"class_name": "tests.nowhere.Tool"},
            r"class_name=tests\.nowhere\.Tool cannot be imported",
        ),
        ({"class_name": "collections.OrderedDict"}, "has no `async def create`"),
        ({**OLD, "tool_schema": None}, "cannot be used: AssertionError: OldTool has no schema"),
        ({**OLD, "tool_schema": {"type": "function"}}, "cannot be used: ValidationError"),
        ({**OLD, "config": {"type": "mcp"}}, r"name MCP servers in actor\.mcp_servers"),
        ({"function_tool_path": "nowhere.py"}, "does not exist: nowhere.py"),
        ({"function_tool_path": __file__.replace("test_playing", "__init__")}, "decorates no function"),
    ],
)
def test_an_entry_that_makes_no_tool_is_refused(entry: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        classes(entry)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.verl_tools: vault and another tool are both called 'vault'"):
        classes(VAULT, {**VAULT, "config": {"points": 1.0}})


def test_a_start_tries_a_tool_of_the_users_own_but_not_one_of_asyncrl() -> None:
    actor = ActorConfig(tools=[], verl_tools=[VAULT, FUNCTIONS])
    assert set(OwnCode.of(actor).tools) == {"vault", "shout", "judge"}
    assert may_reward_turns(actor)
    gsm8k = {"class_name": "asyncrl.compat.verl.tools.gsm8k.Gsm8kTool", "tool_schema": OLD_SCHEMA}
    assert OwnCode.of(ActorConfig(tools=[], verl_tools=[gsm8k])).tools == {}


def test_the_parameters_of_a_tool_keep_their_order() -> None:
    names = ["zeta", "alpha", "middle"]
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    function = {"name": "old", "description": "it", "parameters": parameters}
    [tool] = classes({**OLD, "tool_schema": {"type": "function", "function": function}}).values()
    assert [*tool.schema["parameters"]["properties"]] == names
