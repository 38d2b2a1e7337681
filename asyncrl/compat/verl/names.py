"""`import verl` without verl: files written for verl get asyncrl's classes under verl's names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

from asyncrl.compat.verl import agent_loops, controller
from asyncrl.compat.verl.agent_loops import base, helpers, parsers, tool_agent
from asyncrl.compat.verl.agent_loops.policy import EpisodePolicy
from asyncrl.compat.verl.agent_loops.single_turn import SingleTurnAgentLoop
from asyncrl.compat.verl.batches.auto_padding import DataProtoConfig
from asyncrl.compat.verl.batches.batch_dimensions import collate_fn, fold_batch_dim, unfold_batch_dim, union_tensor_dict
from asyncrl.compat.verl.batches.gathering import all_gather_data_proto
from asyncrl.compat.verl.batches.padding import compute_position_id_with_mask, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.rows import DataProtoItem
from asyncrl.compat.verl.interactions import BaseInteraction, interactions_of
from asyncrl.compat.verl.rewards.loop_managers import (
    DAPOLoopManager,
    GDPOLoopManager,
    NaiveLoopManager,
    RateLimitedRewardManager,
    RemoteRewardManager,
)
from asyncrl.compat.verl.rewards.process_rewards import QwenPRMRewardManager, SkyworkPRMRewardManager
from asyncrl.compat.verl.rewards.rate_limits import AsyncTokenBucket
from asyncrl.compat.verl.rewards.reward_loop import RewardManagerBase, get_event_loop, get_reward_manager_cls
from asyncrl.compat.verl.rewards.reward_loop import register as register_loop_manager
from asyncrl.compat.verl.rewards.reward_managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from asyncrl.compat.verl.rewards.rewarding import AbstractRewardManager, default_compute_score, gsm8k_score
from asyncrl.compat.verl.rollouts import BaseRollout

Named = TypeVar("Named")


def register(name: str) -> Callable[[Named], Named]:
    """verl's decorator for reward managers. It changes nothing, since asyncrl finds managers by their dotted path."""
    return lambda manager: manager


_MANAGERS = {
    "AbstractRewardManager": AbstractRewardManager,
    "BatchRewardManager": BatchRewardManager,
    "DAPORewardManager": DAPORewardManager,
    "NaiveRewardManager": NaiveRewardManager,
    "PrimeRewardManager": PrimeRewardManager,
    "QwenPRMRewardManager": QwenPRMRewardManager,
    "SkyworkPRMRewardManager": SkyworkPRMRewardManager,
    "register": register,
}
_LOOP = "verl.experimental.reward_loop"
_REGISTRY = {"register": register_loop_manager, "get_reward_manager_cls": get_reward_manager_cls}
_LOOP_MANAGERS: Mapping[str, Mapping[str, Any]] = {
    "naive": {"NaiveRewardManager": NaiveLoopManager},
    "dapo": {"DAPORewardManager": DAPOLoopManager},
    "gdpo": {"GDPORewardManager": GDPOLoopManager},
    "limited": {"AsyncTokenBucket": AsyncTokenBucket, "RateLimitedRewardManager": RateLimitedRewardManager},
    "remote": {"RemoteRewardManager": RemoteRewardManager},
}
"""Maps the last name of each verl module that has managers for single rows to the classes in it."""
_BASE = ("ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup")
_DECORATOR = ("Dispatch", "Execute", "make_nd_compute_dataproto_dispatch_fn", "register")
_RAY = ("RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls")
_LOOPS = {name: getattr(agent_loops, name) for name in agent_loops.__all__}
_WRAPS = {"DictConfigWrap": base.DictConfigWrap, "ToolListWrap": base.ToolListWrap}


def _of_controller(*names: str) -> Mapping[str, Any]:
    return {name: getattr(controller, name) for name in names}


MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl": {"DataProto": DataProto},
    "verl.experimental": {},
    _LOOP: {},
    f"{_LOOP}.reward_manager": {
        **_REGISTRY,
        **{name: cls for each in _LOOP_MANAGERS.values() for name, cls in each.items()},
    },
    f"{_LOOP}.reward_manager.base": {"RewardManagerBase": RewardManagerBase, "RawRewardFn": Callable},
    f"{_LOOP}.reward_manager.registry": _REGISTRY,
    **{f"{_LOOP}.reward_manager.{name}": content for name, content in _LOOP_MANAGERS.items()},
    "verl.experimental.agent_loop": {
        **_LOOPS,
        "SingleTurnAgentLoop": SingleTurnAgentLoop,
        "ToolAgentLoop": tool_agent.ToolAgentLoop,
    },
    "verl.experimental.agent_loop.agent_loop": {
        **_LOOPS,
        **_WRAPS,
        "AsyncLLMServerManager": EpisodePolicy,
        "_agent_loop_registry": base.REGISTRY,
    },
    "verl.experimental.agent_loop.single_turn_agent_loop": {"SingleTurnAgentLoop": SingleTurnAgentLoop},
    "verl.experimental.agent_loop.tool_agent_loop": {
        "AgentData": tool_agent.AgentData,
        "AgentState": tool_agent.AgentState,
        "ToolAgentLoop": tool_agent.ToolAgentLoop,
    },
    "verl.experimental.agent_loop.tool_parser": {
        "FunctionCall": parsers.FunctionCall,
        "ToolParser": parsers.ToolParser,
    },
    "verl.experimental.agent_loop.utils": {
        "add_generation_prompt_for_gpt_oss": helpers.add_generation_prompt_for_gpt_oss,
        "build_gpt_oss_tool_response_text": helpers.build_gpt_oss_tool_response_text,
        "format_gpt_oss_tool_response_manually": helpers.format_gpt_oss_tool_response_manually,
        "resolve_config_path": helpers.resolve_config_path,
    },
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": {"initialize_interactions_from_config": interactions_of},
    "verl.protocol": {
        "DataProto": DataProto,
        "DataProtoConfig": DataProtoConfig,
        "DataProtoFuture": controller.DataProtoFuture,
        "DataProtoItem": DataProtoItem,
        "all_gather_data_proto": all_gather_data_proto,
        "collate_fn": collate_fn,
        "fold_batch_dim": fold_batch_dim,
        "pad_dataproto_to_divisor": pad_dataproto_to_divisor,
        "unfold_batch_dim": unfold_batch_dim,
        "union_tensor_dict": union_tensor_dict,
        "unpad_dataproto": unpad_dataproto,
    },
    "verl.single_controller": {},
    "verl.single_controller.base": _of_controller(*_BASE),
    "verl.single_controller.base.decorator": _of_controller(*_DECORATOR),
    "verl.single_controller.base.worker": _of_controller("DistGlobalInfo", "DistRankInfo", "Worker"),
    "verl.single_controller.ray": _of_controller(*_RAY),
    "verl.single_controller.ray.base": _of_controller(*_RAY),
    "verl.utils": {},
    "verl.utils.model": {"compute_position_id_with_mask": compute_position_id_with_mask},
    "verl.utils.ray_utils": {"get_event_loop": get_event_loop},
    "verl.utils.profiler": {"simple_timer": helpers.simple_timer},
    "verl.utils.rollout_trace": {"rollout_trace_op": helpers.rollout_trace_op},
    "verl.utils.reward_score": {"default_compute_score": default_compute_score},
    "verl.utils.reward_score.gsm8k": {"compute_score": gsm8k_score},
    "verl.workers": {},
    "verl.workers.rollout": {"BaseRollout": BaseRollout},
    "verl.workers.rollout.base": {"BaseRollout": BaseRollout},
    "verl.workers.rollout.llm_server": {"LLMServerClient": EpisodePolicy},
    "verl.workers.rollout.replica": {"TokenOutput": agent_loops.TokenOutput},
    "verl.workers.reward_manager": _MANAGERS,
    "verl.workers.reward_manager.abstract": {"AbstractRewardManager": AbstractRewardManager, "RawRewardFn": Callable},
    "verl.workers.reward_manager.naive": {"NaiveRewardManager": NaiveRewardManager},
    "verl.workers.reward_manager.registry": {"register": register},
}
"""Modules of verl that can be imported, and the names in each."""

_TOOLS = "asyncrl.compat.verl.tools"
_SCHEMAS = (
    *("OpenAIFunctionCallSchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionParsedSchema"),
    *("OpenAIFunctionPropertySchema", "OpenAIFunctionSchema", "OpenAIFunctionToolCall", "OpenAIFunctionToolSchema"),
    "ToolResponse",
)
_TOOL_REGISTRY = ("ToolType", "get_tool_class", "initialize_tools_from_config", "load_all_tools")
_FUNCTIONS = (
    *("FUNCTION_TOOL_REGISTRY", "FunctionTool", "function_tool", "get_function_tool", "load_function_tools_from_path"),
    "normalize_function_tool_return",
)
LATER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "verl.tools": ("", ()),
    "verl.tools.base_tool": (f"{_TOOLS}.base", ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse")),
    "verl.tools.function_tool": (f"{_TOOLS}.functions", _FUNCTIONS),
    "verl.tools.gsm8k_tool": (f"{_TOOLS}.gsm8k", ("Gsm8kTool",)),
    "verl.tools.schemas": (f"{_TOOLS}.schemas", _SCHEMAS),
    "verl.tools.tool_registry": (f"{_TOOLS}.registry", _TOOL_REGISTRY),
    "verl.tools.utils": ("", ()),
    "verl.tools.utils.tool_registry": (f"{_TOOLS}.registry", _TOOL_REGISTRY),
}
"""Further modules of verl: for each, the module of asyncrl that has its names, and the names. asyncrl's module needs
pydantic, so it is imported when a program first asks for a name. Modules of verl that are neither here nor in MODULES
cannot be imported."""


def provide_verl() -> bool:
    """Let this process import the names in MODULES and LATER.

    Return False, and do nothing, if verl itself is installed.
    """
    found = sys.modules.get("verl")
    if found is not None:
        return getattr(found, "DataProto", None) is DataProto
    if find_spec("verl") is not None:
        return False
    for name, content in MODULES.items():
        _add_module(name, content)
    for name, (place, names) in LATER.items():
        vars(_add_module(name, {}))["__getattr__"] = _Later(name, place, names)
    return True


def _add_module(name: str, content: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, f"asyncrl's counterpart of {name}.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


@dataclass(frozen=True)
class _Later:
    """Fills the module `module` with `names` of our module `place` when the first of them is asked for."""

    module: str
    place: str
    names: tuple[str, ...]

    def __call__(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(f"asyncrl's counterpart of {self.module} has no {name}")
        ours = import_module(self.place)
        # The names of verl.tools.function_tool share a registry of tools, which is made with the module.
        found = ours.FunctionTools().names() if self.names is _FUNCTIONS else vars(ours)
        vars(sys.modules[self.module]).update({each: found[each] for each in self.names})
        return found[name]
