"""Maps the names that `actor.tool_call_format` takes to the formats of tool calls."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.chat.formats.base import Format
from asyncrl.chat.formats.deepseek import DeepSeekV3, DeepSeekV31
from asyncrl.chat.formats.glm import Glm
from asyncrl.chat.formats.harmony import Harmony
from asyncrl.chat.formats.hermes import Hermes
from asyncrl.chat.formats.kimi import Kimi
from asyncrl.chat.formats.llama3 import Llama3
from asyncrl.chat.formats.mistral import Mistral, MistralV11
from asyncrl.chat.formats.qwen3_coder import Qwen3Coder

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
