"""Tiny vision-language models, and images for them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import ImagesConfig, ModelConfig
from asyncrl.episode.images import ImageDesk
from asyncrl.modelling.images import ImageReader
from asyncrl.modelling.vision import Grid, ImagePatches, vision_shape
from asyncrl.types import Role, Trajectory, Turn
from tests.helpers import make_trajectory

VOCABULARY = 280
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START_TOKEN, END_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN = range(272, 276)
PATCH = 4
MERGE = 2
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "initializer_range": 0.2,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"intermediate_size": 32, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
VISION_FAMILIES = tuple(_TOWERS)


TEMPLATE = """\
{%- macro shown(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for block in content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if block.type == 'image' else block.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function.name }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
"""A chat template of Qwen3-VL's form: it shows images in results of tools, too."""


def vision_tokenizer() -> Any:
    """The demo's tokenizer with the marks of images, and a template of Qwen's form that shows them."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def vision_model(family: str, seed: int = 0) -> Any:
    """A model with large weights, whose tokens are those of the demo's tokenizer, followed by ids for images."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, text_config=_TEXT, vision_config=_VISION | _TOWERS[family], **_ids())
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def save_vision_model(folder: Path, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """A model with its tokenizer and its image processor."""
    vision_model(family, seed).save_pretrained(folder)
    vision_tokenizer().save_pretrained(folder)
    size = {"shortest_edge": 4 * PATCH**2, "longest_edge": 64 * PATCH**2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(folder)
    return folder


def vision_desk(folder: Path, family: str = "qwen2_5_vl") -> ImageDesk:
    """Save such a model in `folder`, and return the desk that reads the images of messages for it."""
    reader = ImageReader.of(ModelConfig(str(save_vision_model(folder, family))), ImagesConfig())
    shape = vision_shape(vision_model(family).config)
    assert shape is not None
    return ImageDesk(reader, shape, ImagesConfig())


def _ids() -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, (START_TOKEN, END_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN), strict=True))


def random_image(grid: Grid, seed: int = 0) -> ImagePatches:
    """Patches of noise."""
    times, rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    return ImagePatches(torch.randn(times * rows * columns, 3 * 2 * PATCH**2, generator=generator), grid)


def shown(
    images: Mapping[bytes, ImagePatches], prompt: Sequence[int | bytes], answer: Sequence[int], **fields: Any
) -> Trajectory:
    """An episode of one answer to a prompt in which digests stand for the placeholders of their images."""
    return shown_in_turns(images, [(prompt, answer)], **fields)


def shown_in_turns(
    images: Mapping[bytes, ImagePatches],
    exchanges: Sequence[tuple[Sequence[int | bytes], Sequence[int]]],
    **fields: Any,
) -> Trajectory:
    """An episode of several answers, each after its prompt or its result of a tool, with digests as in `shown`."""
    tokens: list[int] = []
    spans, digests = [], []
    turns: list[Turn] = []
    for prompt, answer in exchanges:
        begin = len(tokens)
        for each in prompt:
            if isinstance(each, bytes):
                times, rows, columns = images[each].grid
                count = times * rows * columns // MERGE**2
                spans.append((len(tokens), len(tokens) + count))
                digests.append(np.frombuffer(each, np.uint8))
                tokens += [IMAGE_TOKEN] * count
            else:
                tokens.append(each)
        start, end = len(tokens), len(tokens) + len(answer)
        tokens += answer
        turns += [Turn(begin, start, Role.TOOL if turns else Role.PROMPT), Turn(start, end, Role.ASSISTANT)]
    is_sampled = np.zeros(len(tokens), bool)
    for turn in turns[1::2]:
        is_sampled[turn.start : turn.end] = True
    return make_trajectory(
        tokens=np.array(tokens, np.int32),
        logprobs=np.where(is_sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        turns=tuple(turns),
        steps=(),
        image_spans=np.array(spans, np.int32).reshape(-1, 2),
        image_digests=np.array(digests, np.uint8).reshape(-1, 32),
        **fields,
    )


def encoded(size: tuple[int, int], seed: int = 0, format: str = "PNG") -> bytes:
    """The bytes of an image file of noise, `size` pixels wide and high."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format)
    return buffer.getvalue()


def save_wide_vision_model(folder: Path) -> Path:
    """A Qwen2.5-VL for real servers, whose kernels want common sizes, and which need the files of real models."""
    text = _TEXT | {"hidden_size": 64, "head_dim": 16, "vocab_size": 320, "initializer_range": 0.1}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
    vision = _VISION | {"hidden_size": 64, "patch_size": 14, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"window_size": 112, "fullatt_block_indexes": [1], "initializer_range": 0.1}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **_ids())
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    vision_tokenizer().save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil().to_dict()
    processor |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
