"""Dataset classes of a user, as verl takes them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.refusals import refusals
from asyncrl.config.schema import ModelConfig, RunConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import AsyncrlError, DataError
from asyncrl.launch.preflight.tasks.datasets import make_tasks
from asyncrl.launch.preflight.tasks.prompts import prepare_data
from asyncrl.replay.from_config import replay_settings
from asyncrl.replay.store.store import Store
from asyncrl.types import Task
from tests.data.verl_dataset import QuizDataset
from tests.episode.fakes import CHATML, make_tokenizer

QUIZ = [
    {"question": "Capital of France?", "answers": ["Paris"], "level": 1, "topic": "towns"},
    {"question": "Largest planet?", "answers": ["Jupiter", "jupiter"], "level": 2},
]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    make_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "quiz.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in QUIZ))
    config = TrainConfig(model=ModelConfig(path=str(tmp_path / "model")), run=RunConfig(dir=str(tmp_path), name="run"))
    config.data.train, config.actor.tools = [str(tmp_path / "quiz.jsonl")], []
    config.data.dataset = "tests.data.verl_dataset.QuizDataset"
    config.data.dataset_params = {"instruction": "One word."}
    return config


def test_a_class_written_for_verl_makes_the_tasks_of_a_run(
    config: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match="`asyncrl train` makes it"):
        run_tasks(config).usable(config.data.train)
    with caplog.at_level(logging.INFO):
        prepare_data(config)
    assert "data.dataset=tests.data.verl_dataset.QuizDataset made 2 tasks" in caplog.text
    first, second = replay_settings(config).feed.tasks
    system = {"role": "system", "content": "One word."}
    assert first == Task(
        id="quiz/train/0",
        messages=[system, {"role": "user", "content": "Capital of France?"}],
        ground_truth=["Paris"],
        data_source="quiz",
        extra_info={
            "split": "train",
            "index": 0,
            "level": 1,
            "tools_kwargs": {"search": {"create_kwargs": {"topic": "towns"}}},
        },
    )
    assert (second.id, second.ground_truth, second.tools_kwargs) == ("quiz/train/1", ["Jupiter", "jupiter"], {})


class TalkingQuiz(QuizDataset):
    def __getitem__(self, item: int) -> dict[str, Any]:
        return {**super().__getitem__(item), "interaction_kwargs": {"name": "master", "level": np.int64(2)}}


def test_a_class_may_give_its_tasks_a_simulated_user(config: TrainConfig) -> None:
    config.data.dataset = f"{__name__}.TalkingQuiz"
    prepare_data(config)
    first, _ = replay_settings(config).feed.tasks
    assert first.extra_info["interaction_kwargs"] == {"name": "master", "level": 2}


def test_long_prompts_of_a_class_are_left_out_too(config: TrainConfig) -> None:
    config.data.max_prompt_length, config.data.filter_overlong = 10**4, True
    prepare_data(config)
    assert len(run_tasks(config).usable(config.data.train)) == 2


def test_a_run_that_has_begun_keeps_its_tasks_and_another_one_makes_them_anew(config: TrainConfig) -> None:
    make_tasks(config, config.data.train)
    file = Path(config.data.train[0])
    file.write_text(file.read_text().replace("Largest", "Smallest"))
    prepare_data(config)
    assert run_tasks(config).usable(config.data.train)[1].messages[1]["content"] == "Largest planet?"
    make_tasks(config, config.data.train)
    assert run_tasks(config).usable(config.data.train)[1].messages[1]["content"] == "Smallest planet?"
    (Path(config.run.dir) / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    file.write_text(file.read_text().replace("Smallest", "Third"))
    make_tasks(config, config.data.train)
    assert run_tasks(config).usable(config.data.train)[1].messages[1]["content"] == "Smallest planet?"


def test_a_run_that_was_killed_before_its_first_step_keeps_the_tasks_that_its_episodes_name(
    config: TrainConfig,
) -> None:
    make_tasks(config, config.data.train)
    Store(Path(config.run.dir) / "run" / "replay", 1 << 20, durable=False).close()
    file = Path(config.data.train[0])
    file.write_text(file.read_text().replace("Largest", "Smallest"))
    make_tasks(config, config.data.train)
    assert run_tasks(config).usable(config.data.train)[1].messages[1]["content"] == "Largest planet?"


class Rows:
    """A user's data set of one row. Each test sets the row, or the error that reading it raises."""

    row: Any = None

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None) -> None:
        pass

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.row, BaseException):
            raise self.row
        return self.row


GOOD = {"prompt": [{"role": "user", "content": "?"}], "data_source": "s", "reward_model": {"ground_truth": 4}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ValueError("no such row"), r"data\.dataset=.*Rows failed: row 0: .*no such row"),
        (SystemExit(4), r"Rows failed: row 0: SystemExit"),
        ({**GOOD, "extra_info": "x"}, r"Rows failed: row 0: "),
        ({**GOOD, "prompt": "What?"}, "row 0 has no messages under raw_prompt or prompt"),
        ({**GOOD, "reward_model": {}}, "row 0 has no data_source, or no reward_model with a ground_truth"),
        ({**GOOD, "data_source": None}, "row 0 has no data_source"),
        ({**GOOD, "prompt": [{"content": "?"}]}, "row 0 cannot be sent: .*a message without a role"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(
    config: TrainConfig, row: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "row", row)
    config.data.dataset = f"{__name__}.Rows"
    with pytest.raises(AsyncrlError, match=message):
        make_tasks(config, config.data.train)


def test_a_class_without_rows_is_refused_by_its_name(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "__len__", lambda self: 0)
    config.data.dataset = f"{__name__}.Rows"
    with pytest.raises(AsyncrlError, match=r"data\.dataset=.*Rows has no rows of "):
        make_tasks(config, config.data.train)


def test_a_prompt_without_a_raw_prompt_and_a_number_as_ground_truth_are_taken(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "row", GOOD)
    config.data.dataset = f"{__name__}.Rows"
    make_tasks(config, config.data.train)
    (task,) = run_tasks(config).usable(config.data.train)
    assert (task.ground_truth, task.messages) == (4, GOOD["prompt"])


def test_a_class_that_is_not_there_and_params_without_a_class_are_refused(config: TrainConfig) -> None:
    config.data.dataset = "tests.data.verl_dataset.Missing"
    with pytest.raises(AsyncrlError, match=r"data\.dataset=tests\.data.*Missing cannot be imported"):
        make_tasks(config, config.data.train)
    config.data.dataset = None
    assert any(line.startswith("data.dataset_params=") for line in refusals(config))
