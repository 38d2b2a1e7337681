"""Helpers that files written for verl's agent loops import: a timer, a decorator, paths, and gpt-oss's tool results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds that the body of the `with` statement takes to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def rollout_trace_op(function: Called) -> Called:
    """Return the function unchanged. asyncrl records the phases of episodes by its own spans (`observe.spans`)."""
    return function


def resolve_config_path(config_path: str) -> str:
    """The absolute path of a file. Raises FileNotFoundError: it does not exist in the current folder."""
    path = Path(config_path).expanduser().absolute()
    if not path.exists():
        raise FileNotFoundError(f"{config_path} does not exist in {Path.cwd()}")
    return str(path)


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """A tool's result in gpt-oss's format (harmony)."""
    head = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary"
    return f"{head}<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text, followed by the beginning of the policy's next turn in gpt-oss's format."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]) -> str:
    """The results of several tools in gpt-oss's format, up to the policy's next turn."""
    pairs = zip(messages, tool_call_names, strict=True)
    results = (format_gpt_oss_tool_response_manually(message["content"], name) for message, name in pairs)
    return add_generation_prompt_for_gpt_oss("".join(results))
