"""The formats of tool calls by name: those of `actor.tool_call_format`."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.actor.formats.base import Format
from asyncrl.actor.formats.deepseek import DeepSeekV3, DeepSeekV31
from asyncrl.actor.formats.glm import Glm
from asyncrl.actor.formats.harmony import Harmony
from asyncrl.actor.formats.hermes import Hermes
from asyncrl.actor.formats.kimi import Kimi
from asyncrl.actor.formats.llama3 import Llama3
from asyncrl.actor.formats.mistral import Mistral, MistralV11
from asyncrl.actor.formats.qwen3_coder import Qwen3Coder

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Hermes(),
        Llama3(),
        Mistral(),
        MistralV11(),
        DeepSeekV3(),
        DeepSeekV31(),
        Glm(),
        Qwen3Coder(),
        Kimi(),
        Harmony(),
    )
}
