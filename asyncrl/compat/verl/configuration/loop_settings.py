"""Translates the keys of verl's agent loops into the options of `actor.agent=verl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.compat.rows import at_home
from asyncrl.compat.verl.configuration.named_files import missing_file, wrong_class
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.yaml_files import read_yaml
from asyncrl.config.group_files import FAILURES

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
AGENT = f"{ROLLOUT}.agent"
LOOP = f"{AGENT}.default_agent_loop"
TOOL_LOOP = "tool_agent"
OWN_LOOPS = ("single_turn_agent", TOOL_LOOP)
"""verl's agent loops that need no agent here: asyncrl itself plays their episodes."""
OF_LOOPS = (
    "format",
    "function_tool_path",
    "interaction_config_path",
    "max_parallel_calls",
    "tool_config_path",
    "tool_response_truncate_side",
)
"""Keys of `multi_turn` that only agent loops read."""


def loop_options(source: VerlConfig) -> dict[str, Any]:
    """The options of `actor.agent=verl`. Empty if the configuration uses only OWN_LOOPS."""
    default, path = source[LOOP], source[f"{AGENT}.agent_loop_config_path"]
    if not path and default in OWN_LOOPS:
        return {}
    turns = {name: source[f"{TURNS}.{name}"] for name in OF_LOOPS if source.says(f"{TURNS}.{name}")}
    return {
        "default_agent_loop": default,
        **({"agent_loop_config_path": path} if path else {}),
        **({"config": {"actor_rollout_ref": {"rollout": {"multi_turn": turns}}}} if turns else {}),
    }


def wrong_loops(source: VerlConfig) -> Iterator[str]:
    """Lines about files of agent loops, and their classes, that do not exist."""
    for name in ("tool_config_path", "function_tool_path", "interaction_config_path"):
        if (path := source[f"{TURNS}.{name}"]) and (line := missing_file(f"{TURNS}.{name}", path)):
            yield line
    key = f"{AGENT}.agent_loop_config_path"
    if not (path := source[key]):
        yield from wrong_class(LOOP, source[LOOP])
        return
    if line := missing_file(key, path):
        yield line
        return
    try:
        for entry in read_yaml(Path(at_home(path))):
            yield from wrong_class(f"{key}: _target_", str(entry["_target_"]))
    except (*FAILURES, KeyError, TypeError) as error:
        yield f"{key}={path}: it must be a list of loops, each with name and _target_ ({type(error).__name__})"
