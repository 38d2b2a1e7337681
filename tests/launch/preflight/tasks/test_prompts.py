"""Prompts that are too long: refused, left out or cut."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from asyncrl.chat.from_config import open_chat
from asyncrl.chat.prompt_lengths import cut_prompt, prompt_tokens
from asyncrl.config.refusals import refusals
from asyncrl.config.schema import ModelConfig, RunConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.data.layout import RowLayout
from asyncrl.data.reading import TaskFile
from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError, StoppedError
from asyncrl.launch.preflight.epochs import count_steps
from asyncrl.launch.preflight.tasks.prompts import check_prompts, check_room, prepare_data, prompt_lengths
from asyncrl.replay.from_config import replay_settings
from tests.episode.fakes import CHATML, make_tokenizer
from tests.helpers import make_task

SHORT, LONG = "1+2", "1+2" * 30


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Rows 1 and 3 of five have long prompts."""
    make_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    tasks = [
        make_task(row, messages=[{"role": "user", "content": LONG if row in (1, 3) else SHORT}]) for row in range(5)
    ]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    config = TrainConfig(model=ModelConfig(path=str(tmp_path / "model")), run=RunConfig(dir=str(tmp_path), name="run"))
    config.data.train = [str(tmp_path / "tasks.parquet")]
    config.data.max_prompt_length, config.actor.tools = 40, []
    return config


def test_long_prompts_are_refused_with_the_first_row_and_how_many_there_are(config: TrainConfig) -> None:
    with pytest.raises(DataError, match=r"tasks.parquet: row 1 has a prompt of \d+ tokens: it and 1 others of 5 are"):
        check_prompts(config.data, TaskFile(config.data.train), partial(prompt_lengths, config, None))


def test_tasks_with_long_prompts_are_left_out_and_counted_alike_by_every_role(
    config: TrainConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.data.filter_overlong, config.data.shuffle, config.learner.epochs = True, False, 1
    with pytest.raises(DataError, match="`asyncrl train` measures them"):
        run_tasks(config).usable(config.data.train)
    with caplog.at_level(logging.INFO):
        check_prompts(config.data, TaskFile(config.data.train), partial(prompt_lengths, config, None))
    assert "leaves out 2 of 5 tasks, whose prompts are longer than 40 tokens" in caplog.text
    # Nothing is measured again: neither for a role nor for a run that resumes.
    monkeypatch.setattr("asyncrl.chat.from_config.open_chat", None)
    prepare_data(config)
    tasks = run_tasks(config).usable(config.data.train)
    assert [task.id for task in tasks] == ["test/tasks/0", "test/tasks/2", "test/tasks/4"]
    assert [tasks.place(row).rpartition(": ")[2] for row in range(3)] == ["row 0", "row 2", "row 4"]
    assert (list(tasks.by_roles()), list(tasks.by_source())) == ([0], [0])
    config.learner.batch_size, config.learner.group_size = 2, 2
    count_steps(config.learner, config.replay.shards, run_tasks(config))
    assert config.learner.steps == 3
    config.replay.shards = 2
    assert [task.id for task in replay_settings(config).feed.tasks] == [task.id for task in tasks]


def test_a_start_is_refused_if_half_of_the_sampled_prompts_leave_no_room_for_an_answer(config: TrainConfig) -> None:
    config.actor.max_tokens = 40
    tasks = [make_task(row, messages=[{"role": "user", "content": (SHORT, LONG)[row % 2]}]) for row in range(4)]
    write_tasks(Path(config.data.train[0]), tasks)
    message = r"actor.max_tokens=40 leaves no room .* in 2 of 4 prompts .* the first is .*tasks.parquet: row 1 with"
    with pytest.raises(DataError, match=message):
        check_room(config.actor, open_chat(config), TaskFile(config.data.train))


def test_a_few_prompts_without_room_are_only_warned_of(config: TrainConfig, caplog: pytest.LogCaptureFixture) -> None:
    config.actor.max_tokens = 40
    check_room(config.actor, open_chat(config), TaskFile(config.data.train))
    assert "in 2 of 5 prompts" in caplog.text
    caplog.clear()
    config.actor.max_tokens = 4096
    check_room(config.actor, open_chat(config), TaskFile(config.data.train))
    assert not caplog.records


def test_tools_and_system_message_count_against_the_room_of_an_answer(config: TrainConfig) -> None:
    chat = open_chat(config)
    bare = len(chat.prompt(TaskFile(config.data.train)[0].messages, []))
    config.actor.max_tokens = bare + 60
    rows = [make_task(row, messages=[{"role": "user", "content": SHORT}]) for row in range(2)]
    write_tasks(Path(config.data.train[0]), rows)
    check_room(config.actor, chat, TaskFile(config.data.train))
    with pytest.raises(DataError, match="in 2 of 2 prompts"):
        check_room(replace(config.actor, tools=["calculator"]), chat, TaskFile(config.data.train))
    layout = RowLayout({}, "Answer with a number alone. " * 9, False)
    with pytest.raises(DataError, match="in 2 of 2 prompts"):
        check_room(config.actor, chat, TaskFile(config.data.train, None, layout))


def test_of_many_prompts_an_even_sample_is_measured(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.preflight.tasks.prompts.SAMPLED", 3)
    config.actor.max_tokens = 2
    with pytest.raises(DataError, match="in 3 of 3 prompts"):
        check_room(config.actor, open_chat(config), TaskFile(config.data.train))


def test_limits_choose_tasks_before_long_prompts_are_left_out(config: TrainConfig) -> None:
    config.data.limit, config.data.eval_limit = 3, 2
    config.data.eval = config.data.train
    tasks = run_tasks(config)
    assert [task.id for task in tasks.usable(config.data.train)] == [f"test/tasks/{row}" for row in (0, 2, 4)]
    assert [task.id for task in tasks.usable(config.data.eval, held_out=True)] == ["test/tasks/0", "test/tasks/4"]
    config.data.limit, config.data.filter_overlong = 5, True
    prepare_data(config)
    tasks = run_tasks(config)
    assert [task.id for task in tasks.usable(config.data.train)] == [f"test/tasks/{row}" for row in (0, 2, 4)]
    assert len(tasks.usable(config.data.eval, held_out=True)) == 2
    assert len(list((Path(config.run.dir) / "run" / "prompt_lengths").iterdir())) == 2


def test_long_prompts_that_a_limit_leaves_out_are_not_refused(config: TrainConfig) -> None:
    config.data.limit = 3
    check_prompts(config.data, run_tasks(config).all(config.data.train), partial(prompt_lengths, config, None))


def test_a_limit_of_held_out_tasks_needs_held_out_tasks(config: TrainConfig) -> None:
    config.data.eval_limit = 3
    assert any(each.startswith("data.eval_limit=3 with data.eval=null") for each in refusals(config))


def test_a_signal_ends_the_measuring(config: TrainConfig) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="while prompts were measured"):
        check_prompts(config.data, TaskFile(config.data.train), partial(prompt_lengths, config, stop))


def test_if_every_prompt_is_too_long_the_start_is_refused(config: TrainConfig) -> None:
    config.data.filter_overlong, config.data.max_prompt_length = True, 2
    with pytest.raises(DataError, match="no task is left of 5"):
        check_prompts(config.data, TaskFile(config.data.train), partial(prompt_lengths, config, None))


def test_lengths_are_those_of_the_prompts_that_an_actor_begins_with(config: TrainConfig) -> None:
    config.data.filter_overlong = True
    prepare_data(config)
    (file,) = (Path(config.run.dir) / "run" / "prompt_lengths").iterdir()
    chat, tasks = open_chat(config), TaskFile(config.data.train)
    assert np.load(file).tolist() == [len(chat.prompt(task.messages, [])) for task in tasks]


@pytest.mark.parametrize("size", [0, 20, 140])
def test_lengths_of_which_a_crash_left_a_part_are_measured_anew(config: TrainConfig, size: int) -> None:
    config.data.filter_overlong = True
    prepare_data(config)
    (file,) = (Path(config.run.dir) / "run" / "prompt_lengths").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    with pytest.raises(DataError, match="`asyncrl train` measures them"):
        run_tasks(config).usable(config.data.train)
    prepare_data(config)
    assert file.read_bytes() == whole


def test_the_tools_of_a_task_count_as_an_actor_shows_them(config: TrainConfig) -> None:
    chat, offered = open_chat(config), {"name": "add", "parameters": {"type": "object"}}
    own = {"type": "function", "function": {**offered, "name": "subtract"}}
    task = make_task()
    with_offered = chat.prompt(task.messages, [{"type": "function", "function": offered}])
    assert prompt_tokens(chat, task, {"add": offered}).tolist() == with_offered.tolist()
    with_own = chat.prompt(task.messages, [own])
    assert prompt_tokens(chat, make_task(tools=[own]), {"add": offered}).tolist() == with_own.tolist()


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", [2, 3, 4, 5, 6]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 4, 5, 6])]
)
def test_truncation_keeps_what_verls_keeps(truncation: str, kept: list[int]) -> None:
    tokens = np.arange(7, dtype=np.int32)
    assert cut_prompt(tokens, 5, truncation).tolist() == kept
    assert cut_prompt(tokens, 7, truncation).tolist() == tokens.tolist()
    assert cut_prompt(tokens, 1, truncation).tolist() == [0 if truncation == "right" else 6]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data.max_prompt_length": None, "data.filter_overlong": True}, "data.filter_overlong=true with"),
        ({"data.max_prompt_length": None, "data.truncation": "left"}, "data.truncation=left with"),
        ({"data.max_prompt_length": 4096, "actor.max_tokens": 4096}, "data.max_prompt_length=4096 with actor.max"),
        ({"actor.agent": "my.agent"}, "data.max_prompt_length=40 with actor.agent=my.agent"),
        ({"actor.history": "template", "data.truncation": "left"}, "data.truncation=left with actor.history"),
    ],
)
def test_limits_that_cannot_be_met_are_refused(config: TrainConfig, changes: dict[str, object], line: str) -> None:
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    assert any(each.startswith(line) for each in refusals(config))
