"""Tools by name."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.tools import FetchConfig, SearchConfig
from asyncrl.errors import ConfigError
from asyncrl.tools import Tool
from asyncrl.tools.calculator import Calculator
from asyncrl.tools.delayed import SlowCalculator
from asyncrl.tools.registry import BUILT_IN, tool_classes


class NoSchema(Tool):
    async def execute(self, arguments: object) -> str:
        return ""


class MisspeltType(NoSchema):
    schema: ClassVar = {
        "name": "find",
        "description": "finds a word",
        "parameters": {"type": "object", "properties": {"word": {"type": ["null", "strng"]}}},
    }


def test_every_built_in_tool_loads(tmp_path: Path):
    for name in BUILT_IN:
        fetch, search = FetchConfig(hosts=["docs.python.org"]), SearchConfig(indexes=str(tmp_path))
        (cls,) = tool_classes(ActorConfig(tools=[name], fetch=fetch, search=search)).values()
        assert {"name", "description", "parameters"} == set(cls.schema)


def test_tools_are_keyed_by_the_name_that_the_policy_calls():
    assert tool_classes(ActorConfig(tools=["calculator"])) == {"calculator": Calculator}
    assert tool_classes(ActorConfig(tools=["asyncrl.tools.delayed.SlowCalculator"])) == {"calculator": SlowCalculator}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["abacus"], "there is no tool 'abacus'; use one of calculator, fetch"),
        (["no_such_module.Tool"], "cannot be imported"),
        (["asyncrl.tools.base.Missing"], "cannot be imported"),
        (["asyncrl.types.Task"], "must be a subclass"),
        ([f"{__name__}.NoSchema"], "needs a `schema`"),
        ([f"{__name__}.MisspeltType"], "parameter 'word' is of the unknown type 'strng'; did you mean string"),
        (["calculator", "slow_calculator"], "both called 'calculator'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_the_fix(names: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        tool_classes(ActorConfig(tools=names))
