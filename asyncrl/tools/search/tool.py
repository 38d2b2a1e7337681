"""The tool `search`: finds passages for a query, in a corpus on this host or at a retrieval server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.config.schema import ActorConfig
from asyncrl.tools.base import Tool, ToolRefusal
from asyncrl.tools.search.index import CorpusIndex
from asyncrl.tools.search.passages import PassageSource, shown
from asyncrl.tools.search.retrieval import RetrievalServer

LONGEST_QUERY = 1000
QUERIES = 8
BETWEEN = "\n---\n"


class SearchPassages(Tool):
    """Finds passages for one `query`, or for the `query_list` in the schemas of tasks written for verl."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "search",
        "description": "Finds passages of text about a query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for, in a few words"}},
            "required": ["query"],
        },
    }
    source: ClassVar[PassageSource]
    topk: ClassVar[int]
    max_chars: ClassVar[int]

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        settings = actor.search
        source: PassageSource
        if settings.url is not None:
            source = RetrievalServer(settings.url, actor.tool_timeout_s)
        else:
            source = CorpusIndex(settings.corpus, settings.indexes)
        known = {"source": source, "topk": settings.topk, "max_chars": actor.max_tool_chars}
        return type(cls.__name__, (cls,), known)

    @classmethod
    def prepare(cls) -> None:
        cls.source.prepare()

    async def create(self, topk: int | None = None, **kwargs: Any) -> None:
        """Set the number of passages for a query. Other entries, which verl's tasks may have, are ignored."""
        if topk is not None and not (isinstance(topk, int) and topk >= 1):
            raise ValueError(f"tools_kwargs.search.topk is {topk!r}; it must be a whole number from 1")
        self._topk = topk or self.topk

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        queries = _queries(arguments)
        # All queries of a call are sent at once, so that they reach a server in one request.
        found = await asyncio.gather(*(self.source.find(query, self._topk) for query in queries))
        max_chars = max(1, self.max_chars // len(queries) - len(BETWEEN))
        return BETWEEN.join(shown(passages, max_chars) for passages in found)


def _queries(arguments: Mapping[str, Any]) -> list[str]:
    """Read the queries of a call. Raises ToolRefusal: there are none or too many, or one is empty or too long."""
    queries = arguments["query_list"] if "query_list" in arguments else [arguments.get("query")]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ToolRefusal("Error: give a query.")
    if not 1 <= len(queries) <= QUERIES:
        raise ToolRefusal(f"Error: give 1 to {QUERIES} queries.")
    if not all(query.strip() for query in queries):
        raise ToolRefusal("Error: the query is empty.")
    if max(map(len, queries)) > LONGEST_QUERY:
        raise ToolRefusal(f"Error: a query has at most {LONGEST_QUERY} characters.")
    return [query.strip() for query in queries]
