"""The demonstration of a task is recorded as the episode in which the policy said the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from asyncrl.chat import from_config as chat_door
from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ModelConfig, RunConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.data.reading import TaskFile
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.group_demonstrations import DemonstrationRecorder
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.errors import DataError, RefusedError
from asyncrl.launch.preflight.tasks.demonstrations import check_group_demonstrations
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import DEMONSTRATED, Finish, Role, Trajectory
from tests.episode.fakes import (
    CHATML,
    END,
    LIMITS,
    QWEN3,
    ScriptedEngine,
    call,
    make_ticket,
    make_tokenizer,
    make_tool,
    play_with_tools,
)
from tests.helpers import GENEROUS_S

USER = {"role": "user", "content": "Wie groß ist 2+2?"}
CALL = {"type": "function", "function": {"name": "echo", "arguments": json.dumps({"text": "2+2"})}, "id": "a"}
SHOWN = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "assistant", "content": "4é"},
    {"role": "user", "content": "Thanks"},
]


def _calling(tool: str, arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}, "id": "a"}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _record(chat: Chat, shown: Sequence[Mapping[str, Any]] = SHOWN, **limits: Any) -> Trajectory:
    cls, _ = make_tool()
    recorder = DemonstrationRecorder(chat, {"echo": cls.schema}, replace(LIMITS, **limits))
    return recorder(make_ticket(messages=(USER,), demonstration=shown))


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_it_has_the_tokens_turns_calls_and_steps_of_an_episode_and_no_version_or_log_prob(template: str) -> None:
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer, {"enable_thinking": False})

    async def echo(text: str) -> str:
        return "4"

    cls, log = make_tool(echo)
    engine = ScriptedEngine(tokenizer, [call("2+2"), "4é"])
    played = asyncio.run(play_with_tools(engine, chat, {"echo": cls}, make_ticket(messages=(USER,))))
    # More turns, and longer ones, than an episode may have: a demonstration is limited by its tokens alone.
    shown = _record(chat, max_turns=1, max_turn_tokens=3)
    assert np.array_equal(shown.tokens, played.tokens)
    assert np.array_equal(shown.loss_mask, played.loss_mask)
    assert (shown.turns, shown.steps, shown.branches) == (played.turns, played.steps, played.branches)
    assert [turn.tool_calls[0].name for turn in shown.turns if turn.tool_calls] == ["echo"]
    assert (shown.finish, shown.rewards) == (Finish.DEMONSTRATION, {})
    assert set(shown.versions[shown.loss_mask].tolist()) == {DEMONSTRATED}
    assert not shown.logprobs.any()
    assert len(log.executed) == 1, "the tool ran for the episode only"


def test_no_engine_is_asked_and_no_tool_is_made() -> None:
    chat, (cls, log) = Chat(make_tokenizer()), make_tool()
    engine = ScriptedEngine(make_tokenizer(), [])
    limits = ToolLimits(timeout_s=GENEROUS_S, retries=1, max_chars=100)
    recorder = DemonstrationRecorder(chat, {"echo": cls.schema}, LIMITS)
    runner = EpisodeRunner(engine, chat, ToolPlayer(Toolbox({"echo": cls}, limits)), LIMITS, demonstrate=recorder)
    begun: list[bool] = []
    ticket = make_ticket(messages=(USER,), demonstration=SHOWN, min_version=10**6)
    trajectory = asyncio.run(runner.run(ticket, lambda: begun.append(True)))
    assert trajectory.is_demonstration
    assert begun == [True], "it did not wait for a version that no engine will serve soon"
    assert not log.created
    with pytest.raises(RefusedError, match=r"data\.demonstration is not set on this actor"):
        asyncio.run(replace(runner, demonstrate=None).run(ticket, lambda: None))


@pytest.mark.parametrize(
    ("shown", "limits", "why"),
    [
        (SHOWN, {"max_tokens": 60}, r"actor\.max_tokens=60"),
        ([SHOWN[2], SHOWN[2]], {}, "follows another one"),
        ([{"role": "assistant", "content": f"4{END}5"}], {}, "which would end the turn"),
        ([{"role": "nobody", "content": "4"}, SHOWN[2]], {}, "must have a role"),
        ([{"role": "assistant", "content": None}], {}, "message 1 is an assistant turn without content"),
        ([{"role": "assistant", "content": ""}], {}, "message 1 is an assistant turn without content"),
        ([_calling("prize", "{}")], {}, "message 1 calls the tool prize, and the tools on offer are echo"),
        ([_calling("echo", "{}")], {}, "message 1 calls the tool echo, but argument 'text' is missing"),
    ],
)
def test_what_cannot_be_recorded_is_refused(shown: Any, limits: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        _record(Chat(make_tokenizer()), shown, **limits)


def test_calls_in_the_prompt_are_not_checked_because_they_are_not_learned() -> None:
    cls, _ = make_tool()
    recorder = DemonstrationRecorder(Chat(make_tokenizer()), {"echo": cls.schema}, LIMITS)
    prompt = (USER, _calling("older", "{}"), {"role": "tool", "tool_call_id": "a", "content": "3"}, USER)
    assert recorder(make_ticket(messages=prompt, demonstration=SHOWN)).is_demonstration


def test_a_demonstration_behind_an_image_is_refused_since_it_would_not_see_it() -> None:
    recorder = DemonstrationRecorder(Chat(make_tokenizer()), {}, LIMITS)
    shown = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "cats/1.png"}]
    ticket = make_ticket(messages=({"role": "user", "content": shown},), demonstration=SHOWN[2:])
    with pytest.raises(RefusedError, match="shows images"):
        recorder(ticket)


def test_a_trajectory_of_another_ticket_cannot_pass_for_one() -> None:
    with pytest.raises(ValueError, match="less than -1"):
        structs.replace(_record(Chat(make_tokenizer())), finish=Finish.COMPLETED)


def _config(folder: Path, shown: Sequence[Any]) -> TrainConfig:
    """Tasks with these values of the column `target`, JSON text or plain text."""
    make_tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [USER],
            "data_source": "test",
            "reward_model": {"ground_truth": "4"},
            "target": value,
        }
        for value in shown
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "tasks.parquet")
    config = TrainConfig(model=ModelConfig(path=str(folder / "model")), run=RunConfig(dir=str(folder), name="run"))
    config.data.train, config.data.demonstration = [str(folder / "tasks.parquet")], "target"
    config.actor.tools, config.actor.max_tokens = [], 80
    return config


def test_a_column_has_messages_their_json_text_or_one_answer_and_null_where_there_is_none(tmp_path: Path) -> None:
    tasks = run_tasks(_config(tmp_path, [json.dumps(SHOWN[2:]), "4", None])).all([str(tmp_path / "tasks.parquet")])
    answer = [{"role": "assistant", "content": "4"}]
    assert [list(task.demonstration) for task in tasks] == [SHOWN[2:], answer, []]
    messages = _config(tmp_path, [answer, None, None])
    assert [list(task.demonstration) for task in run_tasks(messages).all(messages.data.train)] == [answer, [], []]


def test_held_out_tasks_need_no_such_column(tmp_path: Path) -> None:
    config = _config(tmp_path, ["4"])
    table = pq.read_table(tmp_path / "tasks.parquet").drop_columns(["target"])
    pq.write_table(table, tmp_path / "held_out.parquet")
    assert not run_tasks(config).all([str(tmp_path / "held_out.parquet")])[0].demonstration
    config.data.train = [str(tmp_path / "held_out.parquet")]
    with pytest.raises(DataError, match="has no column target; it has"):
        run_tasks(config).all(config.data.train)


def check(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    check_group_demonstrations(run_tasks(config), config.actor, lambda: chat_door.open_chat(config), files)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (["4", "4" * 100], r"row 1, column target: message 1 ends after \d+ tokens.*actor\.max_tokens=80"),
        (["4", f"4{END}5"], "row 1, column target: message 1 contains"),
        (["4", json.dumps([USER])], "row 1, column target: it has no assistant turn"),
        (["4", '[{"role"'], "row 1, column target: .*; mend it, or set it to null"),
        (["4", ""], "row 1, column target: it is empty text"),
        ([None, None], "data.demonstration=target: all 2 tasks have null there"),
    ],
)
def test_the_start_tries_every_demonstration_and_names_the_row(tmp_path: Path, shown: list[Any], why: str) -> None:
    config = _config(tmp_path, [json.dumps(each) if isinstance(each, list) else each for each in shown])
    if shown[0] is None:
        table = pq.read_table(tmp_path / "tasks.parquet")
        pq.write_table(table.set_column(3, "target", pa.nulls(2, pa.string())), tmp_path / "tasks.parquet")
    with pytest.raises(DataError, match=why):
        check(config, [run_tasks(config).all(config.data.train)])


def test_demonstrations_are_tried_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, ["4", None])
    tasks = run_tasks(config).all(config.data.train)
    check(config, [tasks])
    monkeypatch.setattr("asyncrl.chat.from_config.open_chat", None)
    check(config, [tasks])
    config.actor.max_tokens = 20
    with pytest.raises(TypeError):
        check(config, [tasks])


def test_roles_of_turns_are_those_of_an_episode() -> None:
    roles = [turn.role for turn in _record(Chat(make_tokenizer())).turns]
    assert roles == [Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
