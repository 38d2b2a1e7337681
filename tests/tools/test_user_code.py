"""Code that users wrote may change all that it is given, at every level: the record, retries and delivery do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from asyncrl import wire
from asyncrl.agents.chat_api.agent import AgentPlayer, load_agent
from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ActorConfig
from asyncrl.episode.episode import EpisodeRunner, Player
from asyncrl.episode.steps import split_steps
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.plain import copied
from asyncrl.tools import Response, Tool
from asyncrl.tools.environments.classes import environment_classes
from asyncrl.tools.environments.environments import Environments
from asyncrl.tools.interactions.registry import load_interactions
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.results import read_content
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Role, Ticket, ToolCall, Trajectory, Turn
from tests.episode.fakes import LIMITS, QWEN3, ScriptedEngine, make_ticket, make_tokenizer
from tests.helpers import GENEROUS_S, make_trajectory

ARGUMENTS = {"where": "Paris", "filters": {"years": [1990, 2000], "tags": [{"name": "a"}]}}
SCHEMA = {
    "name": "find",
    "description": "Finds.",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string"}, "filters": {"type": "object"}},
        "required": ["where"],
    },
}
SAID = (
    '<tool_call>\n{"name": "find", "arguments": {"where": "Paris", "filters": {"years": [1990, 2000], "tags": '
    '[{"name": "a"}]}}}\n</tool_call>'
)
ROW: Mapping[str, Any] = {
    "tools_kwargs": {"find": {"stock": [1, {"n": 2}]}},
    "extra_info": {"index": 1, "interaction_kwargs": {"name": "user", "mood": ["calm", {"since": [1]}]}},
}

Given = list[Any]
given: Given = []
"""Copies of the values that the hostile code was given. Each test empties it."""


def ruin(value: Any) -> None:
    """Note what a value is, and change all of it."""
    given.append(copy.deepcopy(value))
    _ruin(value)


def _ruin(value: Any) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _ruin(inner)
        value.clear()
        value["live"] = object()
    if isinstance(value, (list, tuple)):
        for inner in value:
            _ruin(inner)
    if isinstance(value, list):
        value[:] = [object()]


class Find(Tool):
    schema = SCHEMA

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        return "found"


class Executes(Find):
    async def execute(self, arguments: Mapping[str, Any]) -> str:
        ruin(arguments)
        if len(given) == 1:
            raise ConnectionError("once")
        return "found"


class IsCreated(Find):
    async def create(self, **kwargs: Any) -> None:
        ruin(kwargs)
        if len(given) == 1:
            raise ConnectionError("once")


class ChangesItsSchema(Find):
    schema = copy.deepcopy(SCHEMA)

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        _ruin(self.schema)
        return "found"


class Place:
    """An environment that changes nothing."""

    def reset(self, **row: Any) -> None:
        pass

    def find(self, where: str, filters: dict[str, Any]) -> str:
        """Finds.

        Args:
            where: a place
            filters: what else
        """
        return "found"


class IsReset(Place):
    def reset(self, **row: Any) -> None:
        ruin(row)
        if len(given) == 1:
            raise ConnectionError("once")


class IsCalled(Place):
    def find(self, where: str, filters: dict[str, Any]) -> str:
        """Finds.

        Args:
            where: a place
            filters: what else
        """
        ruin(filters)
        return "found"


class User:
    """A simulated user that changes nothing, as verl's are written."""

    def __init__(self, config: Any) -> None:
        self.name = "user"

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        pass

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        return len(messages) > 4, "more?", 0.5, {}

    async def finalize_interaction(self, instance_id: str) -> None:
        pass


class HostileUser(User):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        ruin(config)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        ruin(kwargs)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        reply = await super().generate_response(instance_id, messages)
        ruin([messages, kwargs])
        return reply


def with_tools(cls: type[Tool]) -> Player:
    return ToolPlayer(Toolbox({"find": cls}, ToolLimits(GENEROUS_S, 1)))


def with_environment(cls: type[Place]) -> Player:
    # The reward and the schemas are those of the same name and docstrings.
    classes = environment_classes(ActorConfig(environment=f"{__name__}.{cls.__name__}"))
    return ToolPlayer(Environments(classes, ToolLimits(GENEROUS_S, 1)))


def with_user(cls: type[User]) -> Player:
    config = {"persona": ["kind", {"age": 4}], "class_name": f"{__name__}.{cls.__name__}"}
    entries = {"user": {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": config}}
    before = copy.deepcopy(entries)
    users = Interactions(load_interactions(entries), InteractionLimits())
    assert entries == before
    return ToolPlayer(Toolbox({"find": Find}, ToolLimits(GENEROUS_S)), interactions=users)


async def play(player: Player, ticket: Ticket) -> tuple[Trajectory, str]:
    tokenizer = make_tokenizer(QWEN3)
    chat, engine = Chat(tokenizer), ScriptedEngine(tokenizer, [SAID, "It is Paris.", "Yes.", "Yes."])
    trajectory = await EpisodeRunner(engine, chat, player, LIMITS, as_rendered=True).run(ticket, lambda: None)
    return trajectory, chat.text(trajectory.tokens)


KINDS: Mapping[str, tuple[Callable[[Any], Player], type, type, int]] = {
    "a tool that executes": (with_tools, Executes, Find, 2),
    "a tool that is created": (with_tools, IsCreated, Find, 2),
    "a tool with a schema": (with_tools, ChangesItsSchema, Find, 0),
    "an environment that is reset": (with_environment, IsReset, Place, 2),
    "a method of an environment": (with_environment, IsCalled, Place, 1),
    "a simulated user": (with_user, HostileUser, User, 4),
}
"""The hostile code of each kind: how to play with it, the same code without changes, and the number of its calls."""


@pytest.mark.parametrize("kind", KINDS)
async def test_code_that_changes_what_it_is_given_changes_no_record_no_retry_and_no_delivery(kind: str) -> None:
    with_code, hostile, harmless, calls = KINDS[kind]
    given.clear()
    ticket, fresh = make_ticket(**copy.deepcopy(ROW)), make_ticket(**ROW)
    expected, text = await play(with_code(harmless), fresh)
    found, its_text = await play(with_code(hostile), ticket)
    assert its_text == text
    assert len(found.branches) == 1
    assert (found.turns, [*found.rewards.values()]) == (expected.turns, [*expected.rewards.values()])
    assert [call for turn in found.turns for call in turn.tool_calls] == [ToolCall("find", ARGUMENTS)]
    assert ticket == make_ticket(**ROW)
    wire.encode(wire.trajectory_message(found))
    assert len(given) == calls
    if hostile in (Executes, IsCreated, IsReset):
        assert given[0] == given[1] != {}, "the retry was given something else"


def hostile_agent(task: Any, base_url: str, api_key: str, options: Any) -> None:
    ruin([task.messages, task.tools, task.tools_kwargs, task.extra_info, task.demonstration, options])


async def test_an_agent_gets_a_task_and_options_of_its_own_in_each_episode() -> None:
    given.clear()
    options = {"options": {"depth": [1, 2]}}
    player = AgentPlayer(load_agent(f"{__name__}.hostile_agent", options))
    await player.start()
    try:
        for _ in range(2):
            ticket = make_ticket(**copy.deepcopy(ROW), tools=[{"name": "find", "parameters": {}}])
            with pytest.raises(Exception, match="before any request"):
                await play(player, ticket)
            assert ticket == make_ticket(**ROW, tools=[{"name": "find", "parameters": {}}])
    finally:
        await player.close()
    assert given[0] == given[1]
    assert given[0][-1] == {"depth": [1, 2]}


def test_a_tool_gets_a_configuration_of_its_own() -> None:
    actor = ActorConfig(tools=[f"{__name__}.Configured"])
    assert list(tool_classes(actor)) == ["find"]
    assert actor == ActorConfig(tools=[f"{__name__}.Configured"])


class Configured(Find):
    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        actor.tools.clear()
        return cls


def test_a_result_that_is_changed_later_is_read_as_it_was() -> None:
    block = {"type": "image_url", "image_url": {"url": "data:a"}}
    content = read_content(["see", block])
    ruin(block)
    assert content == [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:a"}}]


def test_a_split_of_steps_gets_a_list_of_its_own() -> None:
    def hostile(pieces: Any) -> list[int]:
        _ruin(pieces)
        return [0, 2]

    trajectory = make_trajectory(length=8)
    turns = [Turn(0, 2, Role.PROMPT), Turn(2, 8, Role.ASSISTANT, "length")]
    assert len(split_steps(hostile, trajectory.tokens, turns, str)) == 2


def test_a_copy_is_equal_and_shares_no_list_or_dictionary() -> None:
    value = {"a": [1, {"b": (2, ["c"])}], "n": None, "x": 1.5, "y": b"z", "t": True}
    own = copied(value)
    assert own == value
    assert type(own["a"][1]["b"]) is tuple  # type: ignore[index]
    _ruin(own)
    assert value == {"a": [1, {"b": (2, ["c"])}], "n": None, "x": 1.5, "y": b"z", "t": True}
