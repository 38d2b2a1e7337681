"""Reads image files, which are untrusted input.

A file must be PNG, JPEG or WebP; no other decoder is ever called. A file whose header announces too many pixels is
refused before it is unpacked. As on servers, only the first picture of an animation is used, and the orientation that a
camera recorded is ignored.
"""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import ImagesConfig, ModelConfig
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.modelling.source import source_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from asyncrl.modelling.vision import ImagePatches

FORMATS = ("PNG", "JPEG", "WEBP")
TAKEN = ImagesConfig(max_mb=math.inf, max_pixels=sys.maxsize)
"""Settings without limits, for images in trajectories. An actor has accepted these images already, perhaps under higher
limits than those of today's configuration."""
NO_PILLOW = "images need Pillow: install asyncrl[vision]"


class BadImageError(InvariantError):
    """The bytes are not an image, or the image is too large."""


def digest_of(data: bytes) -> bytes:
    """The name of an image: the SHA-256 of its bytes."""
    return sha256(data).digest()


def read_image(data: bytes, limits: ImagesConfig) -> Image:
    """Read the picture in a file's bytes, in RGB.

    Raises BadImageError: the file is not a picture, or is too large. ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError(NO_PILLOW) from error
    if len(data) > limits.max_mb * 2**20:
        raise BadImageError(f"an image has {len(data)} bytes; data.images.max_mb={limits.max_mb:g} allows fewer")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise BadImageError(
                    f"an image has {width} by {height} pixels; data.images.max_pixels={limits.max_pixels} allows fewer"
                )
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise BadImageError(f"an image is in none of the formats {', '.join(FORMATS)}") from error
    # Decoders raise many kinds of errors for damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, Image.DecompressionBombError) as error:
        if isinstance(error, BadImageError):
            raise
        raise BadImageError(f"an image cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class ImageReader:
    """Reads image files with the `processor` of a Hugging Face model, within `limits`."""

    processor: Any
    limits: ImagesConfig

    @classmethod
    def of(cls, model: ModelConfig, limits: ImagesConfig) -> ImageReader:
        """Load the image processor in the files of `model`. Raises ConfigError: it cannot be loaded."""
        from transformers import AutoImageProcessor

        try:
            source = source_of(model)
            # Another backend, that of torchvision, would need another package and round differently.
            processor = AutoImageProcessor.from_pretrained(source.path, backend="pil", **source.options)
        except ImportError as error:
            raise ConfigError(NO_PILLOW) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={model.path}: its image processor cannot be loaded: {error}") from error
        return cls(processor, limits)

    def read(self, data: bytes) -> ImagePatches:
        """The patches of the image in a file's bytes.

        Raises BadImageError: the file is refused (see `read_image`), or the processor does not take the image.
        """
        from asyncrl.modelling.vision import ImagePatches

        image = read_image(data, self.limits)
        try:
            found = self.processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise BadImageError(f"the model's image processor does not take an image: {error}") from error
        times, rows, columns = found["image_grid_thw"][0].tolist()
        return ImagePatches(found["pixel_values"], (times, rows, columns))
