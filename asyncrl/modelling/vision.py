"""Images in a vision-language model: how many tokens an image has, and the rotary positions of its tokens.

An image processor cuts an image into patches, in a grid of times, rows and columns. The model's vision tower merges
squares of patches into features, one for each placeholder token of the image.

In the supported families, a rotary position has three dimensions. A text token has the same number in all three, and an
image's token has the time, row and column of its square. The positions of the text after an image continue as if the
image were as long as its longer side.

Source: Wang et al. 2024, "Qwen2-VL", section 2.1 (multimodal rotary position embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.hub import cached_file

from asyncrl.errors import ConfigError
from asyncrl.modelling.source import ModelSource

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The `model_type` of each supported family."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

Grid = tuple[int, int, int]
"""The numbers of times, rows and columns in the grid of an image's patches."""


class ImagePatches(NamedTuple):
    """The output of the processor for an image. `patches` is float32[times * rows * columns, W], in the order of
    `grid`."""

    patches: Tensor
    grid: Grid


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The form of images among a model's tokens.

    - `image_token`: the id of each placeholder of an image
    - `merge`: the side of the square of patches that becomes one feature
    - `width`: how many numbers a patch has
    - `video_token`: the placeholder of videos, which are not supported
    """

    image_token: int
    merge: int
    width: int
    video_token: int | None = None

    def features(self, grid: Grid) -> int:
        """The number of tokens of an image with this grid."""
        times, rows, columns = grid
        return times * (rows // self.merge) * (columns // self.merge)

    def places(self, length: int, spans: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> NDArray[np.int64]:
        """The rotary positions int64[3, length] of a sequence whose images, with these `grids`, are at the token
        `spans`.
        """
        parts, position, done = [], 0, 0
        for (start, end), (times, rows, columns) in zip(spans, grids, strict=True):
            parts.append(_line(position, start - done))
            position += start - done
            sides = times, rows // self.merge, columns // self.merge
            parts.append(position + np.indices(sides).reshape(3, -1))
            position += max(sides[1:])
            done = end
        parts.append(_line(position, length - done))
        return np.concatenate(parts, 1)


def _line(start: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + count), (3, count))


def sees_images(config: Any) -> bool:
    """True if transformers has a model that reads images, and no text-only model, for this Hugging Face
    configuration."""
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def auto_class(config: Any) -> Any:
    """The class of transformers that makes language models of this Hugging Face configuration."""
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def vision_shape(config: Any) -> VisionShape | None:
    """The form of images in models of this Hugging Face configuration; None if the models read no images.

    Raises ConfigError: images of this family are not supported.
    """
    if not sees_images(config):
        return None
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"images of a {config.model_type} model cannot be trained; supported families are {', '.join(FAMILIES)}"
        )
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return VisionShape(
        int(config.image_token_id), int(vision.spatial_merge_size), int(width), getattr(config, "video_token_id", None)
    )


def processor_files(source: ModelSource) -> list[Path]:
    """The files that configure the processing of a model's images and videos, downloaded if necessary."""
    found = (
        cached_file(source.path, name, revision=source.revision, _raise_exceptions_for_missing_entries=False)
        for name in PROCESSOR_FILES
    )
    return [Path(each) for each in found if each is not None]


def decoder_attention(config: Any, name: str) -> str | dict[str, str]:
    """The argument of `set_attn_implementation` that gives the attention `name` only to the decoder."""
    # The vision tower keeps its attention, since images are not packed sequences.
    return {"text_config": name} if sees_images(config) else name
