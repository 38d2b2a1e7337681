"""The tool `search`, as an episode uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.tools import SearchConfig
from asyncrl.errors import ToolError
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.search.passages import TitledPassage, passage_of, shown
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket
from tests.helpers import GENEROUS_S
from tests.network.web import web_server
from tests.tools.search.test_retrieval import Server


def answers(calls: Sequence[dict[str, Any]], search: SearchConfig, chars: int = 4096, **kwargs: Any) -> list[Any]:
    actor = ActorConfig(tools=["search"], search=search, max_tool_chars=chars)
    toolbox = Toolbox(tool_classes(actor), ToolLimits(GENEROUS_S, 0, chars))

    async def main() -> list[Any]:
        async with toolbox.open(make_ticket(tools_kwargs={"search": kwargs})) as tools:
            return await tools.answer([ToolCall("search", call) for call in calls])

    return asyncio.run(main())


@pytest.fixture
def local(tmp_path: Path) -> SearchConfig:
    return SearchConfig(indexes=str(tmp_path), topk=2)


def test_the_policy_reads_passages_in_the_form_of_search_r1(local: SearchConfig):
    (answer,) = answers([{"query": "hearts of an octopus"}], local)
    assert answer.startswith("Doc 1(Title: Octopus) An octopus has three hearts,")
    assert answer.count("Doc ") == answer.count("\n") + 1 <= 2
    assert answers([{"query": "xyzzy"}], local) == ["No passages found."]


def test_a_task_may_want_another_number_and_have_entries_of_other_programs(local: SearchConfig):
    (answer,) = answers([{"query": "capital"}], local, topk=5, ground_truth="x", question="y")
    assert answer.count("Doc ") == 5
    with pytest.raises(ToolError, match="topk is 0; it must be a whole number from 1"):
        answers([{"query": "capital"}], local, topk=0)


def test_several_queries_of_a_call_have_answers_one_behind_the_other(local: SearchConfig):
    (answer,) = answers([{"query_list": ["octopus hearts", "xyzzy"]}], local)
    first, second = answer.split("\n---\n")
    assert first.startswith("Doc 1(Title: Octopus)")
    assert second == "No passages found."


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"query": "  "}, "the query is empty"),
        ({"query": "a" * 1001}, "at most 1000 characters"),
        ({"query_list": []}, "give 1 to 8 queries"),
        ({"query_list": ["a"] * 9}, "give 1 to 8 queries"),
        ({"query_list": [1]}, "give a query"),
        ({"query_list": "a"}, "give a query"),
        ({}, "give a query"),
    ],
)
def test_queries_that_cannot_be_answered_are_the_policys_mistake(
    call: dict[str, Any], reason: str, local: SearchConfig
):
    (answer,) = answers([call], local)
    assert answer.startswith("Error: ")
    assert reason in answer


@pytest.mark.parametrize("chars", [1, 10, 60, 100, 500, 4096])
@pytest.mark.parametrize("queries", [1, 3])
def test_every_passage_has_a_share_of_the_characters_and_none_is_cut_away(
    chars: int, queries: int, local: SearchConfig
):
    (answer,) = answers([{"query_list": ["capital river lake mountain"] * queries}], local, chars)
    assert len(answer) <= chars or chars < 40
    if chars >= 100:
        assert answer.count("Doc 2(") == queries


def test_a_long_passage_leaves_room_for_the_others():
    passages = [TitledPassage("A" * 500, "a" * 5000), TitledPassage("B", "b" * 10), TitledPassage("", "c")]
    text = shown(passages, 900)
    assert len(text) <= 900
    assert text.split("\n")[0].endswith("…")
    assert text.split("\n")[1:] == ["Doc 2(Title: B) bbbbbbbbbb", "Doc 3(Title: ) c"]


def test_the_first_line_of_contents_is_the_title():
    assert passage_of("T\nx\ny") == TitledPassage("T", "x\ny")
    assert passage_of("x") == TitledPassage("", "x")
    assert passage_of("\nx\ny\n") == TitledPassage("", "x\ny")


def test_a_server_answers_the_calls_of_an_episode():
    async def main() -> tuple[list[Any], Server]:
        server = Server()
        async with web_server(server.answer) as port:
            search = SearchConfig(url=f"http://127.0.0.1:{port}/retrieve", topk=1)
            toolbox = Toolbox(tool_classes(ActorConfig(tools=["search"], search=search)), ToolLimits(GENEROUS_S))
            async with toolbox.open(make_ticket()) as tools:
                calls = [ToolCall("search", {"query": query}) for query in ("a", "b")]
                return await tools.answer(calls), server

    found, server = asyncio.run(main())
    assert found == ["Doc 1(Title: a 0) Text of a.", "Doc 1(Title: b 0) Text of b."]
    assert [request["queries"] for request in server.requests] == [["a", "b"]]


def test_a_server_that_is_away_fails_the_episode_with_the_reason():
    with pytest.raises(ToolError, match=r"http://127\.0\.0\.1:1/retrieve cannot be reached"):
        answers([{"query": "a"}], SearchConfig(url="http://127.0.0.1:1/retrieve"))
