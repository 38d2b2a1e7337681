from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from asyncrl.config.schema import ImagesConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.images import BadImageError, ImageReader, digest_of, read_image
from asyncrl.modelling.vision import vision_shape
from tests.vision import PATCH, encoded, save_vision_model, vision_model

pytestmark = pytest.mark.slow


def bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes that announces `side` by `side` pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 16))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_an_image_of_each_format_is_read_in_rgb(format: str):
    image = read_image(encoded((7, 5), format=format), ImagesConfig())
    assert (image.mode, image.size) == ("RGB", (7, 5))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        (b"", ImagesConfig(), "none of the formats PNG, JPEG, WEBP"),
        (b"text", ImagesConfig(), "none of the formats PNG, JPEG, WEBP"),
        (encoded((4, 4), format="BMP"), ImagesConfig(), "none of the formats PNG, JPEG, WEBP"),
        (encoded((4, 4), format="GIF"), ImagesConfig(), "none of the formats PNG, JPEG, WEBP"),
        (encoded((60, 60))[:-2000], ImagesConfig(), "cannot be read"),
        (encoded((60, 60)), ImagesConfig(max_mb=0.001), r"data\.images\.max_mb=0\.001"),
        (encoded((11, 10)), ImagesConfig(max_pixels=100), r"11 by 10 pixels; data\.images\.max_pixels=100"),
        (bomb(10_000), ImagesConfig(), "10000 by 10000 pixels"),
        (bomb(2**31 - 1), ImagesConfig(), "by 2147483647 pixels|cannot be read"),
    ],
)
def test_what_is_no_image_or_would_unpack_to_too_much_is_refused(data: bytes, limits: ImagesConfig, reason: str):
    with pytest.raises(BadImageError, match=reason):
        read_image(data, limits)


@given(st.binary(max_size=40), st.integers(0, 300), st.sampled_from(["PNG", "JPEG", "WEBP"]))
def test_damaged_files_raise_nothing_else(noise: bytes, at: int, format: str):
    whole = encoded((9, 9), format=format)
    with contextlib.suppress(BadImageError):
        read_image(whole[:at] + noise + whole[at + len(noise) :], ImagesConfig())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


def test_an_image_becomes_the_patches_that_its_model_takes(folder: Path):
    reader = ImageReader.of(ModelConfig(str(folder)), ImagesConfig())
    found, shape = reader.read(encoded((30, 21))), vision_shape(vision_model("qwen2_5_vl").config)
    times, rows, columns = found.grid
    assert (times, rows % shape.merge, columns % shape.merge) == (1, 0, 0)
    assert found.patches.shape == (rows * columns, shape.width)
    assert found.patches.dtype == torch.float32
    assert 4 * PATCH**2 <= rows * columns * PATCH**2 <= 64 * PATCH**2
    assert torch.equal(found.patches, reader.read(encoded((30, 21))).patches)


def test_an_image_that_the_processor_does_not_take_is_refused(folder: Path):
    reader = ImageReader.of(ModelConfig(str(folder)), ImagesConfig())
    with pytest.raises(BadImageError, match="aspect ratio"):
        reader.read(encoded((1000, 2)))


def test_a_model_without_an_image_processor_is_refused_with_its_path(tmp_path: Path):
    with pytest.raises(ConfigError, match="its image processor cannot be loaded"):
        ImageReader.of(ModelConfig(str(tmp_path)), ImagesConfig())


def test_the_name_of_an_image_is_the_sha_256_of_its_bytes():
    assert digest_of(b"").hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert np.array(Image.open(io.BytesIO(encoded((3, 2))))).shape == (2, 3, 3)
