"""The configuration that agent loops of verl read: verl's keys, with the values of a run of asyncrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.text import reason_of

ROLLOUT = "actor_rollout_ref.rollout"
_OWN = {
    "prompt_length": "data.max_prompt_length",
    "response_length": "actor.max_tokens",
    "temperature": "actor.temperature",
    "max_assistant_turns": "actor.max_turns",
    "max_tool_response_length": "actor.max_tool_chars",
}
"""Keys of `actor_rollout_ref.rollout` and of its `multi_turn`, each with the option of asyncrl that sets it."""


def loop_config(actor: ActorConfig, data: DataConfig, model: ModelConfig, further: Mapping[str, Any]) -> DictConfig:
    """The configuration of agent loops. `further` has keys of verl for which asyncrl has no option.

    A prompt may have `data.max_prompt_length` tokens. If that option is null, a prompt may have all of
    `actor.max_tokens` except one turn of `actor.max_turn_tokens`. The response may have the rest of `actor.max_tokens`.

    Raises ConfigError: `further` is malformed, or has a key that an option of asyncrl sets.
    """
    prompts = data.max_prompt_length or max(1, actor.max_tokens - actor.max_turn_tokens)
    responses = max(1, actor.max_tokens - prompts)
    multi_turn = {
        "enable": True,
        "max_assistant_turns": actor.max_turns,
        "max_user_turns": actor.max_user_turns,
        "max_parallel_calls": 1,
        "max_tool_response_length": actor.max_tool_chars,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
        "tool_config_path": None,
        "function_tool_path": None,
        "interaction_config_path": None,
    }
    rollout = {
        **{"name": "asyncrl", "mode": "async", "n": 1, "do_sample": True, "full_determinism": False},
        **{"temperature": actor.temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0},
        **{"prompt_length": prompts, "response_length": responses, "max_model_len": actor.max_tokens},
        **{"calculate_log_probs": True, "multi_turn": multi_turn, "custom": None},
        "trace": {"backend": None, "token2text": False},
        "val_kwargs": {"top_p": 1.0, "top_k": -1, "n": 1},
    }
    made = {
        "actor_rollout_ref": {"rollout": rollout, "model": {"path": model.path, "custom_chat_template": None}},
        "data": {
            **{"max_prompt_length": prompts, "max_response_length": responses, "truncation": data.truncation},
            **{"return_raw_chat": True, "apply_chat_template_kwargs": dict(actor.template_kwargs)},
            "mm_processor_kwargs": {},
        },
        "trainer": {"project_name": "asyncrl", "experiment_name": "asyncrl"},
    }
    try:
        given = OmegaConf.create(dict(further))
        for key, own in _OWN.items():
            sections = (ROLLOUT, f"{ROLLOUT}.multi_turn")
            if any(OmegaConf.select(given, f"{section}.{key}") is not None for section in sections):
                raise ConfigError(f"actor.agent_options.config: {key} is {own} here; set that option")
        config = OmegaConf.merge(OmegaConf.create(made), given)
        assert isinstance(config, DictConfig)
        OmegaConf.to_container(config.actor_rollout_ref.rollout.multi_turn, resolve=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"actor.agent_options.config cannot be read: {reason_of(error)}") from error
    return config
