"""Reads the images of an episode, and places them among the episode's tokens.

The model needs a placeholder token for each feature (visual token) of an image, but chat templates write a single
placeholder for the whole image. So this file repeats the placeholder. To know which placeholder belongs to which image,
it gives the template `{"type": "image", "digest": ...}` in place of each image block of a message. The text of a
message never becomes a placeholder (`chat.contents`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.image_blocks import image_blocks, is_image, only_text
from asyncrl.chat.image_sources import Fetch, named_url, read_source
from asyncrl.config.schema import EngineConfig, ImagesConfig, ModelConfig
from asyncrl.engine.base import PlacedImage
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.modelling.images import BadImageError, ImageReader, digest_of
from asyncrl.types import MAX_IMAGES

if TYPE_CHECKING:
    from asyncrl.modelling.vision import VisionShape

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
CACHED = 256
"""The number of images whose token counts are cached. The cache helps because the members of a group show the same
images."""
READS_NONE = "a message shows an image: this needs a model that reads images, and engine.kind=sglang"


class TooManyImagesError(RefusedError):
    """An episode would show more distinct images than a trajectory may have. `code` is the error code in the chat API's
    answer."""

    code = "image_limit"


class ShownImage(NamedTuple):
    """The bytes of an image's file, and the number of its tokens."""

    data: bytes
    tokens: int


class GivenTokens(NamedTuple):
    """Tokens int32[T] of a prompt or a suffix, and the images among them."""

    tokens: NDArray[np.int32]
    images: Sequence[PlacedImage] = ()


@dataclass(eq=False)
class ImageDesk:
    """Reads the images of messages. `shape` says how many tokens an image has. `fetch`: see `read_source`."""

    reader: ImageReader
    shape: VisionShape
    config: ImagesConfig
    fetch: Fetch | None = None

    def __post_init__(self) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()

    @classmethod
    def of(
        cls, model: ModelConfig, engine: EngineConfig, images: ImagesConfig, max_message_mb: float
    ) -> ImageDesk | None:
        """The desk for the policy of `model`. None if the policy or its engine reads no images.

        Raises ConfigError: `vision_shape` or `ImageReader.of` raises it, or `images` allows larger images than the
        replay takes in a message.
        """
        if engine.kind != "sglang":
            return None
        # Imported here, because an episode without images should not wait for torch.
        from asyncrl.modelling.opening import open_config, reads_images
        from asyncrl.modelling.vision import vision_shape

        shape = vision_shape(open_config(model)) if reads_images(engine.kind, model) else None
        if shape is None:
            return None
        if images.max_mb > max_message_mb:
            raise ConfigError(
                f"data.images.max_mb network.max_message_mb: an image of {images.max_mb:g} MB would close the "
                f"connection to the replay, which takes {max_message_mb} MB; lower data.images.max_mb, or raise "
                "network.max_message_mb"
            )
        if not engine.launches and "vision" not in model.freeze:
            log.warning(
                "start SGLang servers with SGLANG_VLM_CACHE_SIZE_MB=0 in their environment: otherwise they reuse "
                "features of images that older weights of the vision tower computed (docs/models.md)"
            )
        return cls(ImageReader.of(model, images), shape, images)

    async def read(self, block: Mapping[str, Any]) -> tuple[bytes, ShownImage]:
        """Read the image of a block. Returns its digest and the image. Raises RefusedError: the block's file cannot be
        read, or is not an image."""
        data = await read_source(block, self.config, self.fetch)
        name = digest_of(data)
        if name not in self._tokens:
            try:
                patches = await asyncio.to_thread(self.reader.read, data)
            except BadImageError as error:
                raise RefusedError(str(error)) from error
            self._tokens[name] = self.shape.features(patches.grid)
            if len(self._tokens) > CACHED:
                self._tokens.popitem(last=False)
        return name, ShownImage(data, self._tokens[name])


class EpisodeImages:
    """The images that the messages of one episode show. `desk` reads the images; if it is None, images are refused."""

    def __init__(self, desk: ImageDesk | None) -> None:
        self._desk = desk
        self._shown: dict[str, ShownImage] = {}
        self._by_url: dict[str, str] = {}

    async def show(self, messages: Messages) -> tuple[Mapping[str, Any], ...]:
        """Read the images of messages. Returns the messages in the form that templates take.

        Raises RefusedError: `ImageDesk.read` raises it, or the policy reads no images, or a block is neither text nor
        an image. Raises TooManyImagesError: the episode would show too many images.
        """
        blocks = image_blocks(messages)
        if self._desk is None and blocks:
            raise RefusedError(READS_NONE)
        if len(blocks) > MAX_IMAGES:
            raise TooManyImagesError(f"{len(blocks)} images are shown at once; an episode may show {MAX_IMAGES}")
        found = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, (list, tuple)):
                message = {**message, "content": [await self._marked(block) for block in content]}
            found.append(message)
        return tuple(found)

    async def _marked(self, block: Any) -> Any:
        if not is_image(block):
            return only_text(block)
        assert self._desk is not None
        # A URL is fetched once, so that an agent's later requests show the same image. A path is read each time,
        # because a tool may write its next screenshot to the same path.
        url = named_url(block)
        digest = self._by_url.get(url) if url else None
        if digest is None:
            name, image = await self._desk.read(block)
            digest = name.hex()
            if len(self._shown) >= MAX_IMAGES and digest not in self._shown:
                raise TooManyImagesError(f"the episode has shown {MAX_IMAGES} images, the most that it may show")
            self._shown[digest] = image
            if url:
                self._by_url[url] = digest
        return {"type": "image", "digest": digest}

    def placed(self, tokens: NDArray[np.int32], messages: Messages) -> GivenTokens:
        """Repeat the placeholder of each image among `tokens`, which the template wrote for `messages`.

        Raises RefusedError: the template shows more or fewer images than the messages have.
        """
        if self._desk is None:
            return GivenTokens(tokens)
        names = [block["digest"] for block in image_blocks(messages)]
        at = np.flatnonzero(tokens == self._desk.shape.image_token)
        if len(at) != len(names):
            roles = ", ".join(sorted({str(message["role"]) for message in messages if image_blocks([message])}))
            raise RefusedError(
                f"the model's chat template shows {len(at)} of {len(names)} images in messages of the roles "
                f"{roles}; show them in messages of the user, or set model.chat_template to one that shows them"
            )
        counts = np.ones(len(tokens), np.int64)
        counts[at] = [self._shown[name].tokens for name in names]
        ends = counts.cumsum()[at]
        placed = zip((ends - counts[at]).tolist(), ends.tolist(), names, strict=True)
        images = [PlacedImage(start, end, bytes.fromhex(name), self._shown[name].data) for start, end, name in placed]
        return GivenTokens(tokens.repeat(counts), images)

    def forged(self, tokens: NDArray[np.int32], images: Sequence[PlacedImage]) -> bool:
        """Return true if `tokens` contain a placeholder that belongs to none of `images`, because the policy sampled
        it."""
        if self._desk is None:
            return False
        shape, placed = self._desk.shape, sum(image.end - image.start for image in images)
        has_video = shape.video_token is not None and bool((tokens == shape.video_token).any())
        return has_video or int((tokens == shape.image_token).sum()) > placed


class OutgoingImages:
    """The images of episodes that have ended but are not delivered yet."""

    def __init__(self) -> None:
        self._by_episode: dict[str, dict[bytes, bytes]] = {}

    def keep(self, episode: str, images: Sequence[PlacedImage]) -> None:
        """Keep the images of an episode that has ended."""
        if images:
            self._by_episode[episode] = {each.name: each.data for each in images}

    def take(self, episode: str) -> dict[bytes, bytes]:
        """Return the images of an episode by their digests, and forget them."""
        return self._by_episode.pop(episode, {})
