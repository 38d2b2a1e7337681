"""Puts images into packed forward passes.

A pass encodes every image once, also if several of its sequences show it. The image's features are copied to all its
placeholder tokens, and the backward pass adds up their gradients.
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
    """The I images of a pass of U tokens, E of which are placeholders.

    - `rows` int64[E]: the indices of the placeholders, ascending.
    - `sources` int64[E]: the index of each placeholder's feature among the features of all images.
    - `places` int64[3, U]: the rotary positions of all tokens.
    - `patches` float32[P, W]: the patches of all images, image after image.
    - `grids` int64[I, 3]: the numbers of time steps, rows and columns in each image's grid of patches.
    """

    rows: Tensor
    sources: Tensor
    places: Tensor
    patches: Tensor
    grids: Tensor

    def keys(self, ids: Tensor) -> Tensor:
        """Return `ids` int64[U], in which the id of each placeholder is replaced by a negative number that is unique to
        its feature. In `ids` itself, all placeholders have the same id, as if all images were equal."""
        return ids.index_copy(0, self.rows, -1 - self.sources)

    def kept(self, kept: Tensor) -> PackedImages:
        """Return the images of a pass that has only the tokens `kept` int64[K], in this order."""
        chosen = torch.full((self.places.shape[1],), -1)
        chosen[self.rows] = self.sources
        chosen = chosen[kept]
        rows = (chosen >= 0).nonzero()[:, 0]
        return replace(self, rows=rows, sources=chosen[rows], places=self.places[:, kept])

    def padded(self, missing: int) -> PackedImages:
        """Return the same images for a pass with `missing` more tokens."""
        return replace(self, places=torch.nn.functional.pad(self.places, (0, missing)))

    def to(self, device: torch.device) -> PackedImages:
        """Copy the images to `device` asynchronously."""
        return PackedImages(*(send(getattr(self, name), device) for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class BatchImages:
    """The images of a batch of N tokens.

    - `images`: the distinct images.
    - `features` int64[N]: the index of each token's feature among the features of all images, or -1 for text.
    - `places` int64[3, N]: the rotary positions of the tokens.
    """

    shape: VisionShape
    images: Sequence[ImagePatches]
    features: Tensor
    places: Tensor

    def chosen(self, rows: Tensor) -> PackedImages | None:
        """Return the images of a pass with the tokens `rows` int64[U], or None if the pass has no images."""
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
    """Lay out the images of a batch. `images` maps the digest of each image of the `trajectories` to the image. Returns
    None if no trajectory has an image.

    Raises ImageError: the tokens of an image's span are not exactly its placeholders."""
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
                    "the image processors of the engine and of model.path differ"
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
    """Return the encoder of a Hugging Face `model`, or None if it reads no images. Raises ConfigError: see
    `vision_shape`."""
    shape = vision_shape(model.config)
    return None if shape is None else ImageEncoder(model, shape)


@dataclass(frozen=True, slots=True, eq=False)
class ImageEncoder:
    """Encodes images by the vision tower of a Hugging Face `model`, for the input of its decoder."""

    model: Any
    shape: VisionShape

    def inputs(self, ids: Tensor, positions: Tensor, images: PackedImages | None) -> dict[str, Any]:
        """Return the decoder's input for `ids` int64[U] and `positions` int64[U], with the features of `images` at
        their placeholders.
        """
        # All ranks gather the tower's sharded weights together. So a pass without images encodes a blank image, which
        # does not change the result of the pass.
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
