"""A harness for verifiers 0.4. It leads the conversation of a rollout, and runs the tools of a task's toolsets. It does
both in the process that calls it.

verifiers' own harnesses start a program for each rollout, and a server for each toolset, which takes seconds. This
harness behaves like verifiers' harness `null`, with the same tool names and the same limit of a tool's result. It is a
plugin, whose id is the name of this module. It needs verifiers 0.4, and does not need asyncrl.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from mcp.server.mcpserver import MCPServer
from verifiers.v1 import EvalClientConfig, Harness, HarnessConfig, HarnessSession, ProgramResult, Toolset, Trace
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import resolve_api_key, resolve_headers
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp, mcp_content_to_chat_content
from verifiers.v1.interception import InterceptionServer

__all__ = ["InProcessChat"]


@dataclass
class LocalTools:
    """The tools of an environment in this process. `make` makes the toolsets of one rollout; all rollouts use `shared`.

    `known` keeps the descriptions of tools, by the class of their toolset.
    """

    # The descriptions are kept because making them again for each rollout would take milliseconds, and memory that is
    # never freed.

    make: Callable[[], Sequence[Toolset[Any, Any]]]
    shared: Sequence[ToolServer]
    known: dict[type, list[Any]]


LOCAL_TOOLS: ContextVar[LocalTools] = ContextVar("local_tools")

ENDS = ("context_length_exceeded", "turn_limit", "image_limit", "image_placeholder")
"""Error codes of the endpoint after which a conversation ends. The conversation up to that point is scored."""


class ToolServer:
    """Offers a toolset in this process, as verifiers' server offers it in a separate one. `trace` is the rollout that
    calls a tool."""

    def __init__(self, toolset: Toolset[Any, Any]) -> None:
        self.trace: Trace | None = None
        self._toolset = toolset
        self._mcp = MCPServer(toolset.server_name or type(toolset).__name__)
        # The rollout's state is in this process, so it is read here. verifiers' server would fetch and send it over
        # HTTP.
        toolset._pull_state = self._pull
        toolset._push_state = self._push

    async def open(self, stack: AsyncExitStack, known: dict[type, list[Any]], task: Any = None) -> None:
        """Set the toolset up for a `task`, or for all tasks (None). Raises the toolset's errors."""
        await stack.enter_async_context(self._toolset._exit_stack)
        await self._toolset.setup()
        if task is not None:
            await self._toolset.setup_task(task)
        kind, tools = type(self._toolset), self._mcp._tool_manager
        if kind.register is not Toolset.register or kind not in known:
            self._toolset.register(self._mcp)
            known[kind] = tools.list_tools()
            return
        for tool in known[kind]:
            own = self._toolset._with_state(getattr(self._toolset, tool.fn.__name__))
            tools._tools[tool.name] = tool.model_copy(update={"fn": own})

    async def schemas(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Map each tool's name that the policy sees to the tool's original name and its schema."""
        prefix = f"{self._toolset.server_name}_" if self._toolset.server_name else ""
        return {
            prefix + tool.name: (tool.name, _schema(prefix + tool.name, tool.description, tool.input_schema))
            for tool in await self._mcp.list_tools()
        }

    async def call(self, name: str, arguments: dict[str, Any], trace: Trace) -> Any:
        self.trace = trace
        try:
            result: Any = await self._mcp.call_tool(name, arguments)
            return mcp_content_to_chat_content(result.content)
        except Exception as error:  # noqa: BLE001 - the policy reads it, as it would read an error of verifiers' server
            return str(error)

    async def _pull(self) -> Any:
        assert self.trace is not None
        return self._toolset._state_cls.model_validate(self.trace.state.model_dump())

    async def _push(self, before: bytes) -> None:
        assert self.trace is not None
        after = self._toolset._state_adapter.dump_json(self._toolset.state)
        if after != before:
            self.trace.state = type(self.trace.state).model_validate_json(after)


def _schema(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


class InProcessChat(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *parts: Any, **more: Any) -> HarnessSession:
        return _Conversation(self, *parts, **more)

    async def launch(self, *parts: Any, **more: Any) -> ProgramResult:
        raise AssertionError("a session runs its turns itself")


class _Conversation(HarnessSession):
    """One rollout. It keeps the messages, so that later requests repeat them exactly as the policy saw them."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._stack = AsyncExitStack()
        self._messages: list[dict[str, Any]] | None = None
        self._tools: list[dict[str, Any]] = []
        self._calls: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._http: aiohttp.ClientSession

    async def _run(self, messages: Any) -> ProgramResult:
        if self._messages is None:
            self._messages = await self._open()
        self._messages += [message_to_wire(message) for message in messages or []]
        while (answer := await self._complete()) is not None:
            self._messages.append(answer)
            if not answer.get("tool_calls"):
                break
            for call in answer["tool_calls"]:
                self._messages.append(bound_tool_message(await self._result(call)))
        return ProgramResult(0, "", "")

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._stack.aclose()

    async def _open(self) -> list[dict[str, Any]]:
        """Open connections and tools. Returns the first messages."""
        unlimited = aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": f"Bearer {self.secret}"}
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=unlimited))
        local = LOCAL_TOOLS.get()
        own = [ToolServer(toolset) for toolset in local.make()]
        for server in own:
            await server.open(self._stack, local.known, self.trace.task.data)
        for server in (*local.shared, *own):
            await self._offer(server)
        await self._offer_remote()
        system, prompt = self.harness.resolve_prompt(self.data)
        first = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*first, {"role": "user", "content": prompt}]
        return [*first, *(message_to_wire(message) for message in prompt or [])]

    async def _offer(self, server: ToolServer) -> None:
        for name, (own_name, schema) in (await server.schemas()).items():
            if name in self._calls:
                raise ValueError(f"two tools have the name {name!r}; give one toolset another TOOL_PREFIX")
            self._tools.append(schema)
            self._calls[name] = lambda given, own=own_name: server.call(own, given, self.trace)  # type: ignore[misc]

    async def _offer_remote(self) -> None:
        """Offer the toolsets that verifiers itself connects to: at an address, or in a container."""
        if not self.mcp_urls:
            return
        limit = self.harness.config.tool_timeout
        servers = {name: {"url": url, "timeout": limit} for name, url in self.mcp_urls.items()}
        schemas, names, connections = await connect_mcp({"mcpServers": servers}, self._stack, set(self._calls))
        self._tools += schemas
        for name in names:
            self._calls[name] = lambda given, name=name: call_mcp(connections, names, name, given)  # type: ignore[misc]

    async def _complete(self) -> dict[str, Any] | None:
        """Request the policy's next message. Returns None if the conversation has no room for another message."""
        body = {"model": self.ctx.model, "messages": self._messages, **({"tools": self._tools} if self._tools else {})}
        async with self._http.post(f"{self.endpoint}/chat/completions", json=body) as answer:
            text = await answer.text()
            if answer.status == 200:
                message = json.loads(text)["choices"][0]["message"]
                return {name: value for name, value in message.items() if value is not None}
        if answer.status == 400 and any(code in text for code in ENDS):
            return None
        raise RuntimeError(f"the policy answered with status {answer.status}: {text[:500]}")

    async def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        name = call["function"]["name"]
        message = {"role": "tool", "tool_call_id": call["id"], "name": name}
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return {**message, "content": f"error: invalid JSON in tool arguments ({error}); resend valid JSON"}
        if self.tool_interception_url:
            decision = await self._decision(call["id"], name, arguments)
            if decision["action"] == "stop":
                raise RuntimeError(decision["reason"])
            if decision["action"] == "deny":
                return dict(decision["message"])
        if not isinstance(arguments, dict):
            return {**message, "content": "error: tool arguments must be a JSON object; resend them as an object"}
        if name not in self._calls:
            return {**message, "content": f"error: unknown tool {name!r}"}
        return {**message, "content": await self._within_limit(name, arguments)}

    async def _decision(self, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        """Request the decision of the task's hooks about a call that has not run yet."""
        body = {"tool_call_id": call_id, "name": name, "arguments": arguments}
        async with self._http.post(self.tool_interception_url, json=body) as answer:
            answer.raise_for_status()
            return dict(await answer.json())

    async def _within_limit(self, name: str, arguments: dict[str, Any]) -> Any:
        limit = self.harness.config.tool_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._calls[name](arguments)
        except TimeoutError:
            return f"error: {name} took more than {limit:g} s"


class OwnInterception(InterceptionServer):
    """Forwards the requests of all rollouts through one HTTP client."""

    # Each rollout has its own key, for which verifiers would make a new client. A new client reads certificates, which
    # takes 20 ms.

    async def start(self) -> None:
        await super().start()
        self._http = build_async_httpx(EvalClientConfig())
        self.stack.push_async_callback(self._http.aclose)

    def _client(self, config: Any) -> EvalClient:
        client = EvalClient.__new__(EvalClient)
        client.base_url, client.api_key = config.base_url, resolve_api_key(config)
        client.headers, client.client = resolve_headers(config), self._http
        return client
