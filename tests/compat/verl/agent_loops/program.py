"""Plays the same episodes with the agent loops of verl, or with asyncrl's own where verl is not installed. As a program
it writes their trajectories as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from asyncrl.compat.verl.agent_loops.base import ToolListWrap
from asyncrl.types import Trajectory
from tests.compat.verl.agent_loops.support import CHAT, TASK, make_player, play
from tests.episode.fakes import Cut, call

LOOPS = "tests.compat.verl.agent_loops.loops"
TOOL_AGENT = "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Says it again.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class Schema:
    """A schema of a tool, as verl's schemas can be dumped."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return json.loads(json.dumps(SCHEMA))


class Echo:
    """A tool with the methods of verl's tools."""

    name = "echo"
    tool_schema = Schema()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        return "1", None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, Any]:
        assert kwargs["agent_data"].messages[0]["content"] == "5*3?"
        return SimpleNamespace(text=parameters["text"] * 2, image=None, video=None), 0.5, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


def with_tools(loop: str = TOOL_AGENT) -> dict[str, Any]:
    return {"tools": {"_target_": loop, "tools": ToolListWrap([Echo()])}}


EPISODES: dict[str, tuple[Any, ...]] = {
    "a single turn": ("single_turn_agent", ["it is 15"]),
    "a turn without an end": ("single_turn_agent", [Cut("it is")]),
    "a user's own loop": (f"{LOOPS}.Twice", ["it is 15", "yes"]),
    "no call": ("tools", ["it is 15"]),
    "a call": ("tools", ["hm " + call("15"), "it is 15"]),
    "two calls": ("tools", [call("1") + "\n" + call("5"), call("again"), "it is 15"]),
    "a row without the tool": ("tools", ["it is 15"], {"tool_selection": ["another"]}),
    "a row that selects the tool": ("tools", [call("1"), "it is 15"], {"tool_selection": ["echo", "another"]}),
    "a call that is cut": ("tools", [call("1"), Cut("<tool_call>\n{")]),
}
MULTI_TURN = {"actor_rollout_ref": {"rollout": {"multi_turn": {"max_parallel_calls": 2}}}}


async def played(
    loop: Any, script: Any, extra_info: dict[str, Any] | None = None, given: dict[str, Any] | None = None
) -> Trajectory:
    """The episode of a row with this `extra_info`."""
    task = replace(TASK, extra_info={**TASK.extra_info, **(extra_info or {})})
    return await play(make_player(loop, config=MULTI_TURN, given=given or with_tools()), script, task=task)


async def trajectories() -> dict[str, Any]:
    return {name: described(await played(*episode)) for name, episode in EPISODES.items()}


def described(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "text": CHAT.text(trajectory.tokens),
        "tokens": trajectory.tokens.tolist(),
        "sampled": trajectory.loss_mask.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
        "rewards": dict(trajectory.rewards),
        "scores": trajectory.turn_scores,
        "finish": str(trajectory.finish),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(trajectories())) + "\n")
