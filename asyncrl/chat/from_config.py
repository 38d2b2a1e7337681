"""Opens the policy's chat from the configuration."""

from __future__ import annotations

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import TrainConfig
from asyncrl.modelling.end_tokens import end_tokens
from asyncrl.modelling.tokenizer import open_tokenizer, template_name


def open_chat(config: TrainConfig) -> Chat:
    """Open the chat template of the policy. Raises ConfigError if it cannot be used."""
    tokenizer, actor = open_tokenizer(config.model), config.actor
    ends = end_tokens(config.model, actor.end_tokens, tokenizer)
    return Chat(tokenizer, actor.template_kwargs, actor.tool_call_format, ends, template_name(config.model))
