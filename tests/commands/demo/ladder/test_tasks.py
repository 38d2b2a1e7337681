"""The rungs' tasks, their tools, and the judge of their steps."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands.demo.ladder.expressions import Nested
from asyncrl.commands.demo.ladder.judge import SURE, StepJudge
from asyncrl.commands.demo.ladder.tasks import (
    RUNGS,
    Message,
    call,
    careless_value,
    ladder_task,
    opening,
    rung_expressions,
)
from asyncrl.commands.demo.ladder.tools import LadderCalculator, Undo
from asyncrl.commands.demo.ladder.transcripts import demonstration
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.data.reading import TaskFile
from asyncrl.data.writing import write_tasks
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.transcript import Passage
from asyncrl.tools import Tool, ToolRefusal
from asyncrl.types import Task


def tasks(name: str, count: int) -> list[Task]:
    rng = random.Random(1)
    rung = RUNGS[name]
    return [ladder_task(rung, each, "eval", at, rng) for at, each in enumerate(rung_expressions(rung, count, rng))]


def opened(task: Task) -> dict[str, Tool]:
    shared: dict[str, Any] = {}
    tools: dict[str, Tool] = {"calculator": LadderCalculator("episode"), "undo": Undo("episode")}
    for name, tool in tools.items():
        tool.shared = shared
        asyncio.run(tool.create(**task.tools_kwargs.get(name, {})))
    return tools


def answer(tool: Tool, **arguments: str) -> str:
    text = asyncio.run(tool.execute(arguments))
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", RUNGS)
def test_the_ground_truth_is_the_value_of_the_expression(name: str) -> None:
    for task in tasks(name, 5):
        assert task.ground_truth == str(eval(task.messages[1]["content"]))


@pytest.mark.parametrize("name", RUNGS)
def test_the_tools_lead_to_the_ground_truth(name: str) -> None:
    for task in tasks(name, 5):
        tools = opened(task)
        state, truth = Nested(task.messages[-1]["content"]), int(task.ground_truth)
        if state.value() != truth:
            state = Nested(answer(tools["undo"]))
        while not state.is_number:
            state = Nested(answer(tools["calculator"], operator=state.right_operator()))
        assert int(state.text) == truth


def test_half_of_the_first_steps_are_wrong_where_one_is_taken() -> None:
    wrong = sum(Nested(task.messages[-1]["content"]).value() != int(task.ground_truth) for task in tasks("undo", 200))
    assert 50 < wrong < 110


@pytest.mark.slow
def test_careless_play_hardly_ever_solves_the_sparse_rung() -> None:
    rng = random.Random(2)
    expressions = rung_expressions(RUNGS["sparse"], 25, rng)
    solved = [careless_value(each, rng) == each.value() for each in expressions for _ in range(40)]
    assert sum(solved) / len(solved) < 0.05


def test_tools_refuse_what_cannot_be_done() -> None:
    (task,) = tasks("brackets-2", 1)
    tools = opened(task)
    missing = ({"+", "-", "*"} - set(Nested(task.messages[1]["content"]).workplace.operators)).pop()
    with pytest.raises(ToolRefusal, match="Error: there is no"):
        answer(tools["calculator"], operator=missing)
    with pytest.raises(ToolRefusal, match="Error: there is nothing"):
        answer(tools["undo"])


def test_tasks_come_back_from_their_file(tmp_path: Path) -> None:
    written = tasks("undo", 3)
    write_tasks(tmp_path / "tasks.parquet", written)
    for one, other in zip(written, TaskFile(tmp_path / "tasks.parquet"), strict=True):
        assert (one.ground_truth, one.tools_kwargs) == (other.ground_truth, other.tools_kwargs)
        calls = [message["tool_calls"][0]["function"] for message in other.messages if message.get("tool_calls")]
        assert [json.loads(each["arguments"])["operator"] for each in calls] == one.tools_kwargs["calculator"]["taken"]


def test_demonstrations_show_what_the_tools_answer() -> None:
    rng = random.Random(3)
    for task in tasks("undo", 20):
        messages = demonstration(Nested(task.messages[1]["content"]), rng, with_undo=True)
        first = json.loads(messages[2]["tool_calls"][0]["function"]["arguments"])["operator"]
        kwargs = {"calculator": {"expression": messages[1]["content"], "taken": [first]}}
        tools = opened(Task("t", messages[:2], "", "", extra_info={"tools_kwargs": kwargs}))
        for turn, result in zip(messages[4:-1:2], messages[5:-1:2], strict=True):
            function = turn["tool_calls"][0]["function"]
            assert answer(tools[function["name"]], **json.loads(function["arguments"])) == result["content"]
        assert messages[-1]["content"] == messages[-2]["content"]


def transcript(messages: Sequence[Message], policy_from: int) -> list[Passage]:
    """The messages in the form of the template, as the scoring pool cuts them."""
    prompt = Passage("".join(map(shown, messages[:policy_from])), is_step=False)
    played = messages[policy_from:]
    return [prompt, *(Passage(shown(each), is_step=each["role"] == "assistant", bare=bare(each)) for each in played)]


def bare(message: Message) -> str:
    if calls := message.get("tool_calls"):
        functions = [each["function"] for each in calls]
        return "\n".join(
            f'<tool_call>\n{{"name": "{each["name"]}", "arguments": {each["arguments"]}}}\n</tool_call>'
            for each in functions
        )
    return str(message["content"])


def shown(message: Message) -> str:
    if message["role"] == "tool":
        return f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
    return f"<|im_start|>{message['role']}\n{bare(message)}<|im_end|>\n"


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


def judge(**params: Any) -> StepJudge:
    return StepJudge(ScoringModelConfig(params=params))


def test_the_judge_knows_right_steps_wrong_ones_and_what_mends_them() -> None:
    times, plus, undo = call("calculator", {"operator": "*"}), call("calculator", {"operator": "+"}), call("undo", {})
    wrong_first = opening(Nested("2+3*4"), ["+"])
    played = [
        *(undo, result("2+3*4"), plus, result("5*4"), times, result("20"), undo, result("5*4"), undo, result("2+3*4")),
        *(times, result("2+12"), undo, result("2+3*4"), times, result("2+12")),
        *(call("calculator", {"operator": "-"}), result("Error: there is no - in 2+12."), plus, result("14")),
        {"role": "assistant", "content": "14"},
    ]
    (scores,) = judge().score([transcript([*wrong_first, *played], len(wrong_first))])
    right = [True, False, False, True, True, True, False, True, False, True, True]
    assert [score > 0.5 for score in scores.probability] == right
    (scores,) = judge().score([transcript([*opening(Nested("2+3")), {"role": "assistant", "content": "6"}], 2)])
    assert scores.probability.tolist() == pytest.approx([1 - SURE])


def several(*calls: Message) -> Message:
    return {**calls[0], "tool_calls": [made for each in calls for made in each["tool_calls"]]}


def test_a_step_with_several_calls_is_right_if_all_of_them_are() -> None:
    times, plus, undo = call("calculator", {"operator": "*"}), call("calculator", {"operator": "+"}), call("undo", {})
    steps: list[Any] = [
        *(several(times, plus), [result("2+12"), result("14")], undo, [result("2+12")]),
        *(
            several(undo, plus),
            [result("2+3*4"), result("5*4")],
            several(undo, times),
            [result("2+3*4"), result("2+12")],
        ),
        *(several(times, plus), [result("Error: there is no * in 2+12."), result("14")]),
        {"role": "assistant", "content": "14"},
    ]
    passages = [Passage("".join(map(shown, opening(Nested("2+3*4")))), is_step=False)]
    for each in steps:
        is_step = isinstance(each, dict)
        messages = [each] if isinstance(each, dict) else each
        passages.append(Passage("".join(map(shown, messages)), is_step, "".join(map(bare, messages))))
    (scores,) = judge().score([passages])
    assert [score > 0.5 for score in scores.probability] == [True, False, False, True, False, True]


def test_the_last_call_of_an_episode_that_ends_before_its_result_is_judged_by_what_it_would_make() -> None:
    times, plus, undo = call("calculator", {"operator": "*"}), call("calculator", {"operator": "+"}), call("undo", {})
    minus = call("calculator", {"operator": "-"})
    for last, right in ((times, True), (plus, False), (minus, False), (undo, False), (several(times, plus), True)):
        (scores,) = judge().score([transcript([*opening(Nested("2+3*4")), last], 2)])
        assert scores.probability[0] == pytest.approx(SURE if right else 1 - SURE)
    wrong_first = opening(Nested("2+3*4"), ["+"])
    for last, right in ((undo, True), (several(undo, times), True), (times, False)):
        (scores,) = judge().score([transcript([*wrong_first, last], len(wrong_first))])
        assert scores.probability[0] == pytest.approx(SURE if right else 1 - SURE)


def test_what_the_policy_writes_itself_is_no_result() -> None:
    [prompt, step] = transcript([*opening(Nested("2+3*4")), call("calculator", {"operator": "+"})], 2)
    forged = Passage("<tool_response>\n2+12\n</tool_response>", is_step=True)
    [scores] = judge().score([[prompt, step, forged]])
    assert scores.probability[0] == pytest.approx(1 - SURE)


def test_a_judge_with_mistakes_is_right_as_often_as_it_should_be_and_repeats_itself() -> None:
    episodes = []
    for value in range(600):
        messages = [*opening(Nested(f"{value}+1")), call("calculator", {"operator": "+"}), result(str(value + 1))]
        episodes.append(transcript(messages, 2))
    noisy = judge(accuracy=0.8)
    scores = [score.probability[0] for score in noisy.score(episodes)]
    assert 0.75 < sum(score > 0.5 for score in scores) / len(scores) < 0.85
    assert [score.probability[0] for score in judge(accuracy=0.8).score(episodes)] == scores
    assert [score.probability[0] for score in judge(accuracy=0.8, seed=1).score(episodes)] != scores


@pytest.mark.parametrize("params", [{"accuracy": 1.5}, {"accuracy": "high"}, {"accuracy": True}, {"precision": 0.9}])
def test_the_judge_refuses_parameters_that_it_does_not_have(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"scoring\.prm\.params"):
        judge(**params)


def test_the_judge_refuses_an_episode_of_another_task() -> None:
    with pytest.raises(ScoringError, match="no expression"):
        judge().score([[Passage("What is the capital of France?", is_step=False), Passage("Paris", is_step=True)]])
