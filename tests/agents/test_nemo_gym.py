"""The agent `nemo_gym` against resources servers that answer as NeMo Gym's do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from asyncrl.agents.chat_api.result import AgentError
from asyncrl.agents.nemo_gym import NemoGymAgent
from asyncrl.types import Trajectory
from tests.agents.chat_api.support import LIMITS
from tests.agents.support import played, scores, served, shown, task_with
from tests.agents.test_openenv import call_of

ROW: Mapping[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": "Count."},
            {"role": "user", "content": "Add 4, then tell the count."},
        ],
        "tools": [
            {
                "type": "function",
                "name": "add",
                "description": "",
                "strict": True,
                "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
            }
        ],
        "temperature": 0.2,
        "background": None,
    },
    "initial_count": 3,
    "expected_count": 7,
}


@dataclass
class Counter:
    """A resources server with a count for each session, which a cookie names."""

    counts: dict[str, int] = field(default_factory=dict)
    verified: list[Any] = field(default_factory=list)
    answers: Mapping[str, Any] = field(default_factory=dict)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/seed_session", self._seed),
            web.post("/add", self._add),
            web.post("/verify", self._verify),
        ]

    async def _seed(self, request: web.Request) -> web.Response:
        session = str(len(self.counts))
        self.counts[session] = (await request.json())["initial_count"]
        response = web.json_response({})
        response.set_cookie("session", session)
        return response

    async def _add(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["count"] > 100:
            return web.json_response({"detail": "too much"}, status=422)
        if asked["count"] == 0:
            return web.Response(status=503, text="no worker")
        self.counts[request.cookies["session"]] += asked["count"]
        return web.json_response({"count": self.counts[request.cookies["session"]]})

    async def _verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        count = self.counts[request.cookies["session"]]
        answer = {
            **body,
            "reward": float(count == body["expected_count"]),
            "count": count,
            "note": "counted",
            "odd": None,
            "vast": 10**400,
        }
        return web.json_response({**answer, **self.answers})


async def counted(server: Counter, script: list[str], row: Mapping[str, Any] = ROW, **limits: int) -> Trajectory:
    async with served(server.routes()) as url:
        return await played(
            NemoGymAgent(url), task_with({"nemo_gym": json.dumps(row)}), script, replace(LIMITS, **limits)
        )


async def test_the_rows_prompt_and_tools_are_played_and_verify_gives_the_reward():
    server = Counter()
    trajectory = await counted(server, [call_of("add", count=4), "It is 7."])
    assert trajectory.rewards == {"reward": 1.0}
    assert len(trajectory.branches) == 1
    prompt, result = shown(trajectory)
    assert "Count." in prompt
    assert "Add 4, then tell the count." in prompt
    assert "Play." not in prompt, "the prompt is that of the row"
    assert '{"count": 7}' in result
    [body] = server.verified
    assert {name: body[name] for name in ROW} == ROW
    response = body["response"]
    assert [item["type"] for item in response["output"]] == ["function_call", "function_call_output", "message"]
    assert response["output"][0]["call_id"] == response["output"][1]["call_id"]
    assert json.loads(response["output"][0]["arguments"]) == {"count": 4}
    assert response["output"][-1]["content"][0]["text"] == "It is 7."


async def test_an_error_of_a_tool_is_the_policys_to_read_and_limits_end_in_a_verification():
    server = Counter()
    trajectory = await counted(server, [call_of("add", count=400), call_of("add", count=1), "never"], max_turns=2)
    assert trajectory.rewards == {"reward": 0.0}
    assert "too much" in shown(trajectory)[1]
    assert trajectory.finish == "truncated"
    assert server.verified[0]["response"]["output"][-1]["type"] == "function_call_output"


@pytest.mark.parametrize(
    ("answers", "script", "reason"),
    [
        ({"reward": None}, ["7"], "has no reward"),
        ({"reward": "1"}, ["7"], "not a finite number"),
        ({"reward": 10**400}, ["7"], "not a finite number"),
        ({}, [call_of("add", count=0)], "status 503: b'no worker'"),
    ],
)
async def test_a_server_that_fails_or_makes_no_sense_fails_the_episode(answers: Any, script: list[str], reason: str):
    with pytest.raises(AgentError, match=reason):
        await counted(Counter(answers=answers), script)


async def test_a_row_that_the_server_or_the_agent_refuses_fails_with_the_reason():
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"detail": "initial_count is missing"}, status=422)

    async with served([web.post("/seed_session", refuse)]) as url:
        with pytest.raises(AgentError, match=r"/seed_session answered with status 422.*initial_count is missing"):
            await played(NemoGymAgent(url), task_with({"nemo_gym": dict(ROW)}), ["1"])
        for row in (None, "{", {"question": 3}):
            with pytest.raises(AgentError, match="is not from `asyncrl data nemo-gym`"):
                await played(NemoGymAgent(url), task_with({"nemo_gym": row}), ["1"])


async def test_a_step_that_does_not_say_whether_the_game_is_over_fails_the_episode():
    async def reset(request: web.Request) -> web.Response:
        return web.json_response({"observation": "Your hand: 12."})

    async def step(request: web.Request) -> web.Response:
        return web.json_response({"observation": "Hand: 19.", "reward": 0.5, "terminated": "false"})

    row = {"responses_create_params": {"input": "Deal."}}
    async with served([web.post("/reset", reset), web.post("/step", step)]) as url:
        with pytest.raises(AgentError, match="terminated and truncated as"):
            await played(NemoGymAgent(url), task_with({"nemo_gym": row}), ["hit"])


async def test_a_server_in_the_style_of_gymnasium_scores_each_turn():
    seen = []

    async def reset(request: web.Request) -> web.Response:
        assert (await request.json())["agent_ref"] == {"name": "hands"}
        return web.json_response({"observation": "Your hand: 12.", "info": {}})

    async def step(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body["response"]["output"])
        last = seen[-1][-1]
        if last["type"] == "function_call":
            outputs = [{"call_id": last["call_id"], "output": "an ace"}]
            return web.json_response({"reward": 0.25, "info": {"tool_outputs": outputs}})
        stands = "stand" in last["content"][0]["text"]
        return web.json_response({"observation": "Hand: 19.", "reward": float(stands), "terminated": stands})

    tool = {"type": "function", "name": "peek", "parameters": {"type": "object", "properties": {}}}
    row = {"responses_create_params": {"input": "Deal.", "tools": [tool]}, "agent_ref": {"name": "hands"}}
    async with served([web.post("/reset", reset), web.post("/step", step)]) as url:
        script = ["hit", call_of("peek"), "stand", "never"]
        trajectory = await played(NemoGymAgent(url), task_with({"nemo_gym": row}), script)
    assert scores(trajectory) == [0.0, 0.25, 1.0]
    assert trajectory.rewards == {}
    assert len(trajectory.branches) == 1
    assert [len(output) for output in seen] == [1, 1, 1], "a step gets the turn alone"
    texts = shown(trajectory)
    assert "Deal." in texts[0]
    assert "Your hand: 12." in texts[0]
    assert "Hand: 19." in texts[1]
    assert "an ace" in texts[2]
