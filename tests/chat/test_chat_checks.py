"""The limits of a chat template are found at the start, with the change that is needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import check_tasks, check_tools, report_rewritings
from asyncrl.chat.formats.base import WrittenCall
from asyncrl.data.reading import TaskFile
from asyncrl.errors import ConfigError
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Finish
from tests.episode.fakes import ScriptedEngine, make_tokenizer, make_tool, play_with_tools
from tests.helpers import GENEROUS_S
from tests.templates.families import FAMILIES, tokenizer

WITHOUT_TOOLS = {"gemma2", "gemma3", "phi3_5", "phi4", "granite"}
UNKNOWN_FORM = {"command_r"}
FUNCTIONS = {name: make_tool(name=name)[0].schema for name in ("echo", "search")}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_two_tools_are_taken_by_every_template_that_shows_tools(name: str):
    chat = Chat(tokenizer(name))
    if name in WITHOUT_TOOLS:
        with pytest.raises(ConfigError, match=r"actor\.tools: echo cannot be used with model\.path"):
            check_tools(chat, FUNCTIONS)
    elif name in UNKNOWN_FORM:
        with pytest.raises(ConfigError, match=r"set actor\.tool_call_format to one of hermes, llama3, .*, harmony"):
            check_tools(chat, FUNCTIONS)
        check_tools(Chat(tokenizer(name), tool_call_format="hermes"), FUNCTIONS)
    else:
        check_tools(chat, FUNCTIONS)


def test_each_tool_is_tried_alone_with_its_schema_and_named():
    bare = {"name": "bare", "description": "has no parameters"}
    with pytest.raises(ConfigError, match="bare cannot be used"):
        check_tools(Chat(tokenizer("hermes3")), {**FUNCTIONS, "bare": bare})


@pytest.mark.parametrize(("name", "end"), [("llama3_1", "<|eot_id|>"), ("gpt_oss", "<|call|>")])
def test_two_calls_in_a_turn_are_answered_with_one_at_a_time_where_the_template_shows_one(name: str, end: str):
    tool, log = make_tool()
    made = tokenizer(name)
    chat = Chat(made)
    one, two, three = (WrittenCall("echo", {"text": text}) for text in "123")
    engine = ScriptedEngine(made, [chat.format.write([one, two]), chat.format.write([three]), "done"], end=end)
    toolbox = Toolbox({"echo": tool}, ToolLimits(GENEROUS_S))
    trajectory = asyncio.run(play_with_tools(engine, chat, toolbox))
    assert trajectory.finish is Finish.COMPLETED
    assert "one tool call at a time; none of these 2 was made" in made.decode(trajectory.tokens.tolist())
    assert log.executed == ["3"]
    assert toolbox.counts.malformed == 1


def task_file(folder: Path, *orders: str) -> TaskFile:
    """A row for each order of roles."""
    path = folder / "tasks.parquet"
    prompts = [[{"role": role, "content": role} for role in order.split()] for order in orders]
    rows = [{"prompt": each, "data_source": "s", "reward_model": {"ground_truth": "1"}} for each in prompts]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return TaskFile(path)


def test_rows_are_grouped_by_the_order_of_their_roles(tmp_path: Path):
    tasks = task_file(tmp_path, "user", "system user", "user", "user assistant user", "system user")
    assert sorted(tasks.by_roles()) == [0, 1, 3]


def test_data_with_system_messages_is_refused_under_a_template_without_them(tmp_path: Path):
    tasks = task_file(tmp_path, "user", "user", "system user")
    named = {tasks.place(row): task for row, task in tasks.by_roles().items()}
    with pytest.raises(
        ConfigError, match=r"tasks.parquet: row 2 has messages of the roles system, user: .*no system role"
    ):
        check_tasks(Chat(tokenizer("gemma2")), named, {})
    check_tasks(Chat(tokenizer("gemma3")), named, {})


@pytest.mark.parametrize(
    ("history", "consequence"), [("sampled", "continue from the sampled tokens"), ("template", "begin a new branch")]
)
def test_what_a_template_rewrites_is_logged_once_with_both_texts(history: str, consequence: str, caplog: Any):
    with caplog.at_level(logging.WARNING):
        report_rewritings(Chat(tokenizer("qwen3")), history)
        report_rewritings(Chat(make_tokenizer()), history)
    [record] = caplog.records
    message = record.getMessage()
    assert consequence in message
    assert "a later question, a system message and tools: recorded" in message
    recorded, _, rendered = message.partition("; thoughts: recorded")[2].partition("rendered")
    assert "thought" in recorded
    assert "thought" not in rendered
