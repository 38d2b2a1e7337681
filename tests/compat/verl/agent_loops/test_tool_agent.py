"""The loop `tool_agent` with tools and simulated users, where verl is not installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.agents.chat_api.result import AgentError
from asyncrl.compat.verl.agent_loops.base import ToolListWrap
from asyncrl.compat.verl.agent_loops.parsers import ToolParser
from asyncrl.compat.verl.agent_loops.tool_agent import AgentData, AgentState, ToolAgentLoop
from asyncrl.compat.verl.names import provide_verl
from asyncrl.errors import ConfigError
from asyncrl.types import Finish, Role, Task, Trajectory
from tests.compat.verl.agent_loops.program import MULTI_TURN, TOOL_AGENT, Echo, Schema
from tests.compat.verl.agent_loops.support import CHAT, TASK, TOKENIZER, make_player, play
from tests.episode.fakes import Script, call

pytestmark = pytest.mark.skipif(not provide_verl(), reason="verl itself is installed here")
HOST = f"{__name__}.Host"


class Broken(Echo):
    """Fails once it has begun. `released` counts its ends."""

    released = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise OSError("no disk")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        type(self).released += 1


class Divides(Echo):
    """A tool whose errors depend on the policy's arguments."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["text"] == "down":
            raise RuntimeError("search failed") from ConnectionError("refused")
        return SimpleNamespace(text=str(1 / int(parameters["text"])), image=None, video=None), 1.0, {}


class Camera(Echo):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return SimpleNamespace(text="", image=[b""], video=None), 0.0, {}


class Function:
    """A tool without a life, as verl's function tools are."""

    name = "echo"
    tool_schema = Schema()

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    async def call(self, arguments: dict[str, Any]) -> Any:
        return self.returned


class Host:
    """A simulated user who is content with the third answer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.name = config["name"]
        self.polite = config.get("polite", False)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        self.began = kwargs
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        turns = sum(message["role"] == "assistant" for message in messages)
        return turns == 3, "again, please" if self.polite else "again", turns / 4, {}


async def played(tool: Any, script: Script, task: Task = TASK, **limits: int) -> Trajectory:
    given = {"tools": {"_target_": TOOL_AGENT, "tools": ToolListWrap([tool])}}
    return await play(make_player("tools", config=MULTI_TURN, given=given, **limits), script, task=task)


def results(trajectory: Trajectory) -> list[str]:
    texts = [CHAT.text(trajectory.tokens[turn.start : turn.end]) for turn in trajectory.turns if turn.role is Role.TOOL]
    return [text.split("<tool_response>\n")[-1].split("\n</tool_response>")[0] for text in texts]


async def test_a_row_without_a_tool_cannot_call_it() -> None:
    task = replace(TASK, extra_info={**TASK.extra_info, "tool_selection": ["another"]})
    trajectory = await played(Echo(), [call("1"), "done"], task)
    assert results(trajectory) == ["Error: there is no tool 'echo'; there are: "]
    assert "echo" not in CHAT.text(trajectory.tokens[: trajectory.turns[0].end])
    assert trajectory.rewards == {}


async def test_the_rewards_of_tools_are_a_reward_of_the_episode() -> None:
    trajectory = await played(Echo(), [call("1") + call("2"), call("3"), "done"])
    assert trajectory.rewards == {"tool_rewards": 1.5}
    assert trajectory.timings["tools"] >= 0
    assert results(trajectory)[-1] == "33"


async def test_a_tool_that_fails_is_released_and_fails_the_episode() -> None:
    with pytest.raises(AgentError, match="failed: OSError: no disk"):
        await played(Broken(), [call("1")])
    assert Broken.released == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"text": "0"}', "raised ZeroDivisionError: division by zero"),
        ('{"text": "x"}', "raised ValueError: invalid literal for int() with base 10: 'x'"),
        ("{}", "raised KeyError: 'text'"),
        ("[4, 2]", "raised TypeError: list indices must be integers or slices, not str"),
        ('"{}"', "raised TypeError: string indices must be integers, not 'str'"),
        ("null", "raised TypeError: 'NoneType' object is not subscriptable"),
    ],
)
async def test_the_policy_reads_the_error_that_its_arguments_make(arguments: str, error: str) -> None:
    given = {"tools": {"_target_": TOOL_AGENT, "tools": ToolListWrap([Divides()])}}
    player = make_player("tools", given=given, config=MULTI_TURN)
    wrong = f'<tool_call>\n{{"name": "echo", "arguments": {arguments}}}\n</tool_call>'
    trajectory = await play(player, [wrong, call("2"), "done"])
    assert results(trajectory) == [f"Error: the tool 'echo' {error}", "0.5"]
    assert trajectory.rewards == {"tool_rewards": 1.0}
    assert player.counters()["agent/tool_errors"] == 1


async def test_the_policy_reads_that_a_function_needs_arguments_by_name() -> None:
    wrong = '<tool_call>\n{"name": "echo", "arguments": [4, 2]}\n</tool_call>'
    trajectory = await played(Function("hello"), [wrong, "done"])
    assert results(trajectory) == ["Error: the arguments of 'echo' are [4, 2], not a JSON object"]


async def test_a_tool_fails_the_episode_if_a_connection_caused_its_error() -> None:
    with pytest.raises(AgentError, match="failed: RuntimeError: search failed"):
        await played(Divides(), [call("down")])


async def test_the_policy_reads_that_there_is_no_tool_of_a_name() -> None:
    trajectory = await played(Echo(), [call("1", "fetch"), "done"])
    assert results(trajectory) == ["Error: there is no tool 'fetch'; there are: echo"]
    assert trajectory.rewards == {}


async def test_a_tool_that_shows_an_image_is_refused() -> None:
    with pytest.raises(AgentError, match="a tool returned an image or a video"):
        await played(Camera(), [call("1")])


@pytest.mark.parametrize(
    ("returned", "text", "rewards"),
    [
        ("hello", "hello", {}),
        ({"a": 1}, '{"a": 1}', {}),
        (("hello", 0.5), "hello", {"tool_rewards": 0.5}),
        ((SimpleNamespace(text="seen"), None, {"k": 1}), "seen", {}),
        ("x" * 50, "x" * 10 + "...(truncated)..." + "x" * 10, {}),
    ],
)
async def test_a_function_tool_returns_a_response_alone_or_with_a_reward(
    returned: Any, text: str, rewards: dict[str, float]
) -> None:
    trajectory = await played(Function(returned), [call("1"), "done"], max_tool_chars=20)
    assert results(trajectory) == [text]
    assert trajectory.rewards == rewards


async def test_a_result_without_room_for_another_turn_ends_the_episode() -> None:
    trajectory = await played(Function("x" * 400), [call("1")], max_tokens=300, max_turn_tokens=100)
    assert [turn.role for turn in trajectory.turns] == [Role.PROMPT, Role.ASSISTANT]


async def test_the_number_of_turns_is_that_of_the_actor() -> None:
    trajectory = await played(Echo(), [call("1"), call("2")], max_turns=2)
    assert sum(turn.role is Role.ASSISTANT for turn in trajectory.turns) == 2
    assert trajectory.finish is Finish.COMPLETED


async def test_a_simulated_user_answers_turns_without_calls(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(f"interaction:\n- class_name: {HOST}\n  config: {{polite: true}}\n")
    config = {"actor_rollout_ref": {"rollout": {"multi_turn": {"interaction_config_path": str(path)}}}}
    player = make_player("tool_agent", config=config)
    task = replace(TASK, extra_info={"interaction_kwargs": {"name": "host", "query": "5*3?"}})
    trajectory = await play(player, ["one", "two", "three"], task=task)
    assert trajectory.turn_scores == [0.25, 0.5, 0.75]
    assert "again, please" in results(trajectory)[0]
    with pytest.raises(AgentError, match=r"interaction_kwargs.name is 'guest'; there are: host"):
        await play(player, [], task=replace(TASK, extra_info={"interaction_kwargs": {"name": "guest"}}))
    path.write_text("interaction: 3")
    with pytest.raises(AgentError, match="cannot be read"):
        await play(make_player("tool_agent", config=config), [], task=task)


class Guarded(ToolAgentLoop):
    """Lets no tool run, and counts the states that it met."""

    met: list[AgentState] = []  # noqa: RUF012

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        self.met.append(AgentState.PROCESSING_TOOLS)
        return AgentState.TERMINATED

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        self.met.append(AgentState.GENERATING)
        return await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)


async def test_a_subclass_replaces_the_method_of_a_state() -> None:
    given = {"guarded": {"_target_": f"{__name__}.Guarded", "tools": ToolListWrap([Echo()])}}
    trajectory = await play(make_player("guarded", given=given), [call("1")])
    assert [turn.role for turn in trajectory.turns] == [Role.PROMPT, Role.ASSISTANT]
    assert Guarded.met == [AgentState.GENERATING, AgentState.PROCESSING_TOOLS]


async def test_a_parser_finds_the_calls_that_can_be_read() -> None:
    parser = ToolParser.get_tool_parser("hermes", TOKENIZER)
    text = f"well {call('5')}\n<tool_call>\nnothing\n</tool_call>"
    _, [made] = await parser.extract_tool_calls(TOKENIZER.encode(text, add_special_tokens=False))
    assert (made.name, json.loads(made.arguments)) == ("echo", {"text": "5"})
    with pytest.raises(ValueError, match="there is no tool parser 'toml'; there are: hermes"):
        ToolParser.get_tool_parser("toml", TOKENIZER)


def test_tools_that_cannot_be_loaded_are_refused() -> None:
    config = {"actor_rollout_ref": {"rollout": {"multi_turn": {"tool_config_path": "nowhere.yaml"}}}}
    with pytest.raises(ConfigError, match="tool_config_path"):
        make_player("tool_agent", config=config)
