"""The loop `tool_agent`: the policy takes turns with the tools of verl, or with a simulated user."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import uuid4

from asyncrl.compat.verl.agent_loops.base import AgentLoopBase, ToolListWrap, register
from asyncrl.compat.verl.agent_loops.helpers import simple_timer
from asyncrl.compat.verl.agent_loops.outputs import AgentLoopOutput
from asyncrl.compat.verl.agent_loops.parsers import FunctionCall, ToolParser
from asyncrl.compat.verl.interactions import interactions_of
from asyncrl.errors import AsyncrlError, RefusedError
from asyncrl.text import message_of, reason_of
from asyncrl.tools.base import ToolRefusal
from asyncrl.tools.toolbox import SELECTION

log = logging.getLogger(__name__)

MOST_VALUES = 3
_OF_FILES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass
class ToolText:
    """A text that the policy reads in place of a tool's result. It has the fields of verl's ToolResponse."""

    text: str | None = None
    image: Any = None
    video: Any = None


class AgentState(Enum):
    """The next act of the loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """The episode so far. A tool gets it as `agent_data`, and may keep data of its own in `extra_fields`."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        metrics: dict[str, Any],
        request_id: str,
        tools_kwargs: Mapping[str, Any],
        interaction: Any = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages = messages
        self.metrics = metrics
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs
        self.interaction = interaction
        self.interaction_kwargs = dict(interaction_kwargs or {})
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = 0
        self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        # The tools that the row selects; None: all tools of the loop. Subclasses read the attribute by this name.
        self._active_tools: Mapping[str, Any] | None = None
        self.image_data = self.video_data = self.audio_data = None
        self.extra_fields: dict[str, Any] = {}


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Lets the policy and its tools take turns. After a turn without calls the simulated user answers, if there is one.
    Otherwise the episode ends.

    Each state has a method that returns the next state, so a subclass can replace one of them. `tools` are objects with
    the methods of verl's tools. Keys of `multi_turn` in the configuration limit turns, calls and results.
    """

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        turns = self.rollout_config.multi_turn
        self.max_user_turns = turns.max_user_turns
        self.max_assistant_turns = turns.max_assistant_turns
        self.max_parallel_calls = turns.max_parallel_calls
        self.max_tool_response_length = turns.max_tool_response_length
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self.tools = {tool.name: tool for tool in (tools.tools if tools else ())}
        self.tool_schemas = [_schema(tool) for tool in self.tools.values()]
        self.tool_parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)
        self.interactions = interactions_of(turns.get("interaction_config_path"))
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        of_user = (kwargs.get("extra_info") or {}).get("interaction_kwargs") or {}
        agent_data = AgentData(
            list(kwargs["raw_prompt"]), {}, uuid4().hex, kwargs.get("tools_kwargs") or {}, self._user(of_user), of_user
        )
        if selection := (kwargs.get("extra_info") or {}).get(SELECTION):
            agent_data._active_tools = {name: self.tools[name] for name in selection if name in self.tools}
        if agent_data.interaction is not None:
            await agent_data.interaction.start_interaction(agent_data.request_id, **agent_data.interaction_kwargs)
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            match state:
                case AgentState.PENDING:
                    state = await self._handle_pending_state(agent_data, sampling_params)
                case AgentState.GENERATING:
                    state = await self._handle_generating_state(agent_data, sampling_params)
                case AgentState.PROCESSING_TOOLS:
                    state = await self._handle_processing_tools_state(agent_data)
                case AgentState.INTERACTING:
                    state = await self._handle_interacting_state(agent_data)
        responses, length = len(agent_data.response_mask), self.response_length
        start = len(agent_data.prompt_ids) - responses
        return AgentLoopOutput(
            prompt_ids=agent_data.prompt_ids[:start],
            response_ids=agent_data.prompt_ids[start:][:length],
            response_mask=agent_data.response_mask[:length],
            response_logprobs=agent_data.response_logprobs[:length],
            num_turns=agent_data.user_turns + agent_data.assistant_turns + 1,
            metrics=agent_data.metrics,  # type: ignore[arg-type]
            extra_fields={
                **agent_data.extra_fields,
                "turn_scores": agent_data.turn_scores,
                "tool_rewards": agent_data.tool_rewards,
            },
        )

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """Render the prompt."""
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, tools=self._schemas(agent_data))
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Let the policy take a turn, and read its calls. With `ignore_termination` the episode may then be longer than
        `response_length`."""
        with simple_timer("generate_sequences", agent_data.metrics):
            sampled = await self.server_manager.generate(
                agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=sampling_params
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = sampled.token_ids
        agent_data.extra_fields |= sampled.extra_fields
        merged, agent_data.response_mask, logprobs = await self.ct_merge_assistant_token(
            agent_data.prompt_ids,
            sampled.token_ids,
            agent_data.response_mask,
            agent_data.response_logprobs,
            sampled.log_probs,
        )
        agent_data.prompt_ids, agent_data.response_logprobs = merged.token_ids, logprobs or []
        over = not ignore_termination and len(agent_data.response_mask) >= self.response_length
        if over or _reached(agent_data.assistant_turns, self.max_assistant_turns):
            return AgentState.TERMINATED
        if _reached(agent_data.user_turns, self.max_user_turns):
            return AgentState.TERMINATED
        text, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids)
        agent_data.messages.append(_assistant(text, agent_data.tool_calls[: self.max_parallel_calls]))
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Run the turn's first `max_parallel_calls` calls concurrently, and add their results to the tokens."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(
                *(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls)
            )
        agent_data.tool_rewards += [reward for _, reward, _ in results if reward is not None]
        messages = [
            {"role": "tool", "name": call.name, "content": self._shortened(response), **_id_of(call)}
            for call, (response, _, _) in zip(calls, results, strict=True)
        ]
        return await self._add(agent_data, messages)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Let the simulated user answer the policy's turn."""
        ends, said, score, _ = await agent_data.interaction.generate_response(
            agent_data.request_id, agent_data.messages, **agent_data.interaction_kwargs
        )
        if score is not None:
            agent_data.turn_scores.append(score)
        if ends:
            agent_data.user_turns += 1
            return AgentState.TERMINATED
        return await self._add(agent_data, [{"role": "user", "content": said}])

    async def _add(self, agent_data: AgentData, messages: list[dict[str, Any]]) -> AgentState:
        """Add messages to the tokens, unless the response has no room for them and another turn."""
        before = list(agent_data.messages)
        agent_data.messages += messages
        merged, mask, logprobs = await self.ct_merge_context_msg(
            *(
                before,
                agent_data.messages,
                agent_data.prompt_ids,
                agent_data.response_mask,
                agent_data.response_logprobs,
            ),
            tools=self._schemas(agent_data),
        )
        if len(mask) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids, agent_data.response_mask, agent_data.response_logprobs = (
            merged.token_ids,
            mask,
            logprobs or [],
        )
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData
    ) -> tuple[Any, float | None, dict[str, Any]]:
        """The response of a tool, its reward and further data.

        If there is no tool of that name, or the tool raises an exception, the policy reads an error. The episode fails
        if the tool cannot be created, or if the error is one of the environment (`_is_of_environment`).
        """
        tools = self.tools if agent_data._active_tools is None else agent_data._active_tools
        tool = tools.get(tool_call.name)
        if tool is None:
            known = ", ".join(tools)
            return ToolText(f"Error: there is no tool {tool_call.name!r:.80}; there are: {known}"), None, {}
        try:
            arguments = json.loads(tool_call.arguments)
        except (ValueError, TypeError) as error:
            return ToolText(f"Error: the arguments of {tool_call.name!r:.80} are not JSON: {error}"), None, {}
        if not hasattr(tool, "create"):
            if not isinstance(arguments, dict):
                problem = f"are {arguments!r:.80}, not a JSON object"
                return ToolText(f"Error: the arguments of {tool_call.name!r:.80} {problem}"), None, {}
            returned = await _answered(tool, tool.call(arguments), agent_data)
            return _as_result(returned)
        kwargs = tools_kwargs.get(tool_call.name) or {}
        id, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
        try:
            returned = await _answered(tool, tool.execute(id, arguments, agent_data=agent_data), agent_data)
        finally:
            await tool.release(id)
        response, reward, further = returned
        return response, reward, further

    def _schemas(self, agent_data: AgentData) -> list[dict[str, Any]]:
        """The schemas of the episode's tools."""
        selected = agent_data._active_tools
        return self.tool_schemas if selected is None else [_schema(tool) for tool in selected.values()]

    def _shortened(self, response: Any) -> str:
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise RefusedError("a tool returned an image or a video: agent loops of verl show only text here")
        text, most = response.text or "", int(self.max_tool_response_length)
        if len(text) <= most:
            return text
        match self.tool_response_truncate_side:
            case "left":
                return f"(truncated)...{text[-most:]}"
            case "right":
                return f"{text[:most]}...(truncated)"
        half = most // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"

    def _user(self, kwargs: Mapping[str, Any]) -> Any:
        """The user that a row names; None if no users are configured. Raises RefusedError: the name is unknown."""
        if not self.interactions:
            return None
        name = kwargs.get("name")
        if name not in self.interactions:
            known = ", ".join(self.interactions)
            raise RefusedError(f"extra_info.interaction_kwargs.name is {name!r:.50}; there are: {known}")
        return self.interactions[name]


def _schema(tool: Any) -> dict[str, Any]:
    """The schema of a tool as a mapping."""
    schema = tool.tool_schema
    if isinstance(schema, Mapping):
        return dict(schema)
    dumped: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dumped


def _assistant(text: str, calls: list[FunctionCall]) -> dict[str, Any]:
    """A turn of the policy as a message."""
    made = [
        {"type": "function", "function": {"name": each.name, "arguments": _read(each.arguments)}, **_call_id(each)}
        for each in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _read(arguments: str) -> Any:
    """The arguments of a call: a mapping if they are a JSON object, else JSON text."""
    try:
        read = json.loads(arguments)
    except (ValueError, TypeError):
        return json.dumps(str(arguments))
    return read if isinstance(read, dict) else arguments


def _call_id(call: FunctionCall) -> dict[str, str]:
    return {} if call.tool_call_id is None else {"id": call.tool_call_id}


def _id_of(call: FunctionCall) -> dict[str, str]:
    return {} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id}


async def _answered(tool: Any, call: Awaitable[Any], agent_data: AgentData) -> Any:
    """The values that the tool returns, or an error that the policy reads.

    Raises what the tool raises, if that is an error of the environment.
    """
    try:
        return await call
    except Exception as error:
        if _is_of_environment(error):
            raise
        log.warning("the policy reads that the tool %s raised %s", tool.name, reason_of(error))
        counts = agent_data.extra_fields
        counts["tool_errors"] = counts.get("tool_errors", 0) + 1
        return ToolText(f"Error: the tool {tool.name!r} raised {message_of(error)}"), None, {}


def _is_of_environment(error: BaseException | None) -> bool:
    """True for a connection, a timeout, a disk or an engine that failed, and for errors with such a cause. A file that
    does not exist or must not be read may be the policy's mistake."""
    if error is None:
        return False
    of_system = (OSError, MemoryError, AsyncrlError)
    if isinstance(error, of_system) and not isinstance(error, (*_OF_FILES, ToolRefusal)):
        return True
    return _is_of_environment(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _as_result(returned: Any) -> tuple[Any, float | None, dict[str, Any]]:
    """The result of a function tool: a response alone, or with a reward and further data. Raises TypeError: it returned
    another number of values."""
    values = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(values) <= MOST_VALUES:
        raise TypeError(f"a function tool returned {len(values)} values; return the response, with a reward and data")
    response, reward, further = (*values, None, None)[:MOST_VALUES]
    if not hasattr(response, "text"):
        response = ToolText(json.dumps(response, ensure_ascii=False) if isinstance(response, dict) else str(response))
    return response, reward, further or {}


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit
