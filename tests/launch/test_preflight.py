"""Before anything starts: a chat template that does not take the tools or the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.actor.tools.base import Tool
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import preflight
from tests.templates.families import tokenizer


def config_of(folder: Path, family: str, roles: list[str], tools: list[str]) -> TrainConfig:
    tokenizer(family).save_pretrained(folder / "model")
    prompt = [{"role": role, "content": role} for role in roles]
    kwargs = {"weather": {"city": "Ulm"}}
    row = {
        "prompt": prompt,
        "data_source": "s",
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"tools_kwargs": kwargs},
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "tasks.parquet")
    return TrainConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(train=str(folder / "tasks.parquet")),
        actor=ActorConfig(tools=tools),
    )


@pytest.mark.parametrize(
    ("roles", "tools", "message"),
    [
        (["system", "user"], [], r"tasks\.parquet: row 0 has messages of the roles system, user"),
        (["user"], ["calculator"], r"actor\.tools: calculator cannot be used with model\.path"),
    ],
)
def test_what_a_template_does_not_show_does_not_start(tmp_path: Path, roles: list[str], tools: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        preflight(config_of(tmp_path, "gemma2", roles, tools))


@pytest.mark.parametrize("family", ["llama3_1", "hermes3", "deepseek_v3"])
def test_several_tools_start_under_templates_that_show_one_call_or_have_one_for_tools(tmp_path: Path, family: str):
    preflight(config_of(tmp_path, family, ["system", "user"], ["calculator", "python"]))


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.model.path = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"model\.path=.*none: its tokenizer cannot be loaded"):
        preflight(config)


def test_all_that_cannot_be_used_is_named_at_once(tmp_path: Path):
    config = config_of(tmp_path, "gemma2", ["user"], ["abacus"])
    config.scoring.rule, config.algorithm.loss.name = "guess", "pppo"
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["actor.tools", "scoring.rule=guess", "algorithm.loss=pppo"]


class Weather(Tool):
    """Its `create` gets the city from the data; `released` counts the ends of its episodes."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "weather",
        "description": "it",
        "parameters": {"type": "object", "properties": {}},
    }
    released = 0

    async def create(self, city: str) -> None:
        self.city = city

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        return f"rain in {self.city}"

    async def release(self) -> None:
        Weather.released += 1


class Forecast(Weather):
    schema: ClassVar[Mapping[str, Any]] = {**Weather.schema, "name": "forecast"}


def test_tools_are_created_for_a_row_of_the_data_before_the_start_and_released(tmp_path: Path):
    preflight(config_of(tmp_path, "hermes3", ["user"], [f"{__name__}.Weather"]))
    assert Weather.released == 1
    with pytest.raises(ConfigError, match=r"with row 0 of .*tasks\.parquet, tool forecast failed to create .*'city'"):
        preflight(config_of(tmp_path, "hermes3", ["user"], [f"{__name__}.Weather", f"{__name__}.Forecast"]))
    assert Weather.released == 3
