"""The images of packed forward passes.

A pass encodes every image once, however many of its sequences have it: features are gathered at the placeholder
tokens, and gradients add up on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.modelling.packed_layout import send
from asyncrl.modelling.vision import ImagePatches, VisionShape, vision_shape
from asyncrl.types import Trajectory


class ImageError(InvariantError):
    """Images that do not fit the tokens of their episode."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """The I images of a pass of U tokens. E tokens are placeholders.

    - `rows` int64[E]: which tokens these are, ascending; `sources` int64[E]: which feature each of them gets, of those
      of all images one behind the other.
    - `places` int64[3, U]: the rotary positions of all tokens.
    - `patches` float32[P, W] of all images one behind the other, in `grids` int64[I, 3].
    """

    rows: Tensor
    sources: Tensor
    places: Tensor
    patches: Tensor
    grids: Tensor

    def keys(self, ids: Tensor) -> Tensor:
        """`ids` int64[U] with another number for each feature: placeholders are alike whatever they stand for."""
        return ids.index_copy(0, self.rows, -1 - self.sources)

    def kept(self, kept: Tensor) -> PackedImages:
        """The images of a pass with the tokens `kept` int64[K] alone, in their order."""
        chosen = torch.full((self.places.shape[1],), -1)
        chosen[self.rows] = self.sources
        chosen = chosen[kept]
        rows = (chosen >= 0).nonzero()[:, 0]
        return replace(self, rows=rows, sources=chosen[rows], places=self.places[:, kept])

    def padded(self, missing: int) -> PackedImages:
        """The same with so many tokens more."""
        return replace(self, places=torch.nn.functional.pad(self.places, (0, missing)))

    def to(self, device: torch.device) -> PackedImages:
        """The same on `device`; the host does not wait for it."""
        return PackedImages(*(send(getattr(self, name), device) for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class BatchImages:
    """The distinct `images` of a batch of N tokens: `features` int64[N] are the tokens' features, among those of all
    images one behind the other, -1 for text; `places` int64[3, N] are their rotary positions."""

    shape: VisionShape
    images: Sequence[ImagePatches]
    features: Tensor
    places: Tensor

    def chosen(self, rows: Tensor) -> PackedImages | None:
        """The images of a pass with the tokens `rows` int64[U]; None: it has none."""
        features = self.features[rows]
        at = (features >= 0).nonzero()[:, 0]
        if not len(at):
            return None
        starts = torch.tensor([0, *accumulate(self.shape.features(each.grid) for each in self.images)])
        owners = torch.searchsorted(starts, features[at], right=True) - 1
        used, own = owners.unique(return_inverse=True)
        sizes = (starts[1:] - starts[:-1])[used]
        sources = (sizes.cumsum(0) - sizes)[own] + features[at] - starts[owners]
        images = [self.images[index] for index in used.tolist()]
        patches, grids = torch.cat([each.patches for each in images]), torch.tensor([each.grid for each in images])
        return PackedImages(at, sources, self.places[:, rows], patches, grids)


def batch_images(
    trajectories: Sequence[Trajectory], images: Mapping[bytes, ImagePatches], shape: VisionShape
) -> BatchImages | None:
    """The images of a batch of `trajectories`, from all that they name by their digests; None: they have none.

    Raises ImageError: an image takes more or fewer tokens than it has, or other tokens than placeholders."""
    names = dict.fromkeys(name for each in trajectories for name in each.image_names)
    if not names:
        return None
    own = [images[name] for name in names]
    starts = dict(zip(names, accumulate((shape.features(each.grid) for each in own), initial=0), strict=False))
    features, places = [], []
    for trajectory in trajectories:
        found = np.full(len(trajectory), -1)
        named = list(zip(trajectory.image_spans.tolist(), trajectory.image_names, strict=True))
        for (start, end), name in named:
            expected = shape.features(images[name].grid)
            if expected != end - start or (trajectory.tokens[start:end] != shape.image_token).any():
                raise ImageError(
                    f"{trajectory.id}: its tokens [{start}, {end}) are not the {expected} placeholders of its image: "
                    "the engine's image processor is not that of model.path"
                )
            found[start:end] = np.arange(starts[name], starts[name] + expected)
        features.append(found)
        for first, last in trajectory.branches:
            inside = [
                (start - first, end - first, images[name].grid) for (start, end), name in named if first <= start < last
            ]
            spans, grids = [(start, end) for start, end, _ in inside], [grid for _, _, grid in inside]
            places.append(shape.places(last - first, spans, grids))
    joined = torch.from_numpy(np.concatenate(features)), torch.from_numpy(np.concatenate(places, 1))
    return BatchImages(shape, own, *joined)


def image_encoder(model: Any) -> ImageEncoder | None:
    """The encoder of a Hugging Face `model`; None: it reads no images. Raises ConfigError: see `vision_shape`."""
    shape = vision_shape(model.config)
    return None if shape is None else ImageEncoder(model, shape)


@dataclass(frozen=True, slots=True, eq=False)
class ImageEncoder:
    """The vision tower of a Hugging Face `model`, whose images are of `shape`, as part of the input of its decoder."""

    model: Any
    shape: VisionShape

    def inputs(self, ids: Tensor, positions: Tensor, images: PackedImages | None) -> dict[str, Any]:
        """What the decoder takes instead of `ids` int64[U] and `positions` int64[U], with the features of `images`.

        A pass without images encodes a blank one, which changes nothing: the tower is sharded, and all ranks gather
        its weights together.
        """
        given = self._blank(ids.device) if images is None else (images.patches, images.grids)
        output = self.model.model.get_image_features(*given)
        embeddings = self.model.get_input_embeddings()(ids)
        features = torch.cat(list(output.pooler_output)).to(embeddings.dtype)
        layers = [torch.cat(list(each)) for each in getattr(output, "deepstack_features", None) or []]
        if images is None:
            for each in (features, *layers):
                embeddings = embeddings + each[:0].sum().to(embeddings.dtype)
            return {"inputs_embeds": embeddings[None], "position_ids": positions[None]}
        embeddings = embeddings.index_copy(0, images.rows, features[images.sources])
        places = torch.cat([positions[None], images.places])[:, None]
        inputs = {"inputs_embeds": embeddings[None], "position_ids": places}
        if layers:
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[images.rows] = True
            inputs["visual_pos_masks"] = mask[None]
            inputs["deepstack_visual_embeds"] = [each[images.sources] for each in layers]
        return inputs

    def _blank(self, device: torch.device) -> tuple[Tensor, Tensor]:
        side = self.shape.merge
        grid = torch.tensor([[1, side, side]], device=device)
        return torch.zeros(side * side, self.shape.width, device=device), grid
