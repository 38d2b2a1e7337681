"""Checks at the start that a model computes the same for packed sequences as for each sequence alone.

The model is sharded already, so all ranks run the passes of the check together, within one forward pass of the sharded
module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.images import ImageEncoder, PackedImages, image_encoder
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.attention import check_same_logits, inspect_attention
from asyncrl.modelling.logprobs import capped
from asyncrl.modelling.packed_attention import EXTRAS, PACKED
from asyncrl.modelling.vision import VisionShape, decoder_attention

LONGEST_PROBE = 256
"""Attention windows of at most this many tokens are checked with sequences that are longer than the window."""


def attend_packed(
    root: nn.Module, model: Any, attention: str, length: int, ranks: Ranks, dtype: torch.dtype, compiled: bool
) -> None:
    """Give `model` the `attention` of this name over packed sequences of at most `length` tokens. `root` is the sharded
    module, which contains the model or only its decoder, and computes in `dtype`. All ranks call this. Raises
    ConfigError if the results would differ from those of the model's own attention.
    """
    trial = _Trial(model, attention, ranks, dtype, any(each is model for each in root.modules()))
    # FSDP gathers the weights only for a forward method of the root.
    root.attend_packed = trial.run  # type: ignore[assignment]
    register_fsdp_forward_method(root, "attend_packed")
    with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        # On a GPU, FSDP needs at least one argument of a forward pass, such as `length`.
        root.attend_packed(length)  # type: ignore[operator]
    del root.attend_packed


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """Compares packed and plain passes: their logits if `with_head`, or else their last hidden states."""

    model: Any
    attention: str
    ranks: Ranks
    dtype: torch.dtype
    with_head: bool

    def run(self, length: int) -> None:
        model, attention, device = self.model, self.attention, self.ranks.device
        plain = model.config._attn_implementation
        # sdpa refuses soft caps and sinks; asyncrl's own attention and transformers' flash attention compute them.
        allowed = () if attention == "sdpa" else EXTRAS
        found = []
        # Flex attention applies the model's own masks. The other attentions ignore masks, so masks are inspected.
        if attention != "flex_attention":
            found = inspect_attention(model, length, allowed, device)
        if not isinstance(model.get_decoder(), PreTrainedModel) or model.get_decoder() is model:
            raise ConfigError("its decoder cannot be run without its head")
        narrowest = min((each.window for each in found if each.window is not None), default=0)
        sequences, encoder = self._probes(narrowest), image_encoder(model) if self.with_head else None
        model.set_attn_implementation(plain)
        images = None
        if encoder is not None:
            sequences, images = _with_image(sequences, encoder.shape)
        tried = replace(PackedSequences.of(sequences), images=images).divided(self.ranks.context).to(device)
        first, *others = (each[None].to(device) for each in sequences)
        alone = torch.cat([self._plain(first, tried.images), *map(self._plain, others)])
        ours = PACKED if attention in ("auto", "sdpa") else attention
        model.set_attn_implementation(decoder_attention(model.config, ours))
        states = tried.whole(hidden_states(model.get_decoder(), tried, encoder))[: len(alone)]
        packed = capped(model.get_output_embeddings()(states), logit_cap(model.config)) if self.with_head else states
        check_same_logits(alone, packed, self.dtype, "it scales its logits, or mixes sequences")

    def _plain(self, ids: Tensor, images: PackedImages | None = None) -> Tensor:
        if self.with_head:
            inputs = {}
            if images is not None:
                kinds = torch.zeros_like(ids, dtype=torch.int32).index_fill(1, images.rows, 1)
                inputs = {"pixel_values": images.patches, "image_grid_thw": images.grids, "mm_token_type_ids": kinds}
            logits: Tensor = self.model(input_ids=ids, use_cache=False, **inputs).logits[0]
            return logits
        states: Tensor = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        return states

    def _probes(self, window: int) -> list[Tensor]:
        """Return two sequences of different tokens and different lengths. They are longer than the window if it has at
        most LONGEST_PROBE tokens, and short otherwise."""
        lengths = (window + 5, window + 8) if window <= LONGEST_PROBE else (5, 8)
        ids = torch.arange(sum(lengths)) * 7 % self.model.config.get_text_config().vocab_size
        return list(ids.split(lengths))


def _with_image(sequences: Sequence[Tensor], shape: VisionShape) -> tuple[list[Tensor], PackedImages]:
    """Put one image into the first sequence, and return all sequences and the image. Other placeholder ids are
    replaced."""
    grid = (1, shape.merge, 2 * shape.merge)
    count, another = shape.features(grid), int(shape.image_token == 0)
    first, *others = (each.masked_fill(each == shape.image_token, another) for each in sequences)
    shown = torch.cat([first[:2], torch.full((count,), shape.image_token), first[2:]])
    places = [shape.places(len(shown), [(2, 2 + count)], [grid]), *(shape.places(len(each), [], []) for each in others)]
    rows, patches = torch.arange(2, 2 + count), grid[1] * grid[2]
    pixels = torch.arange(patches * shape.width).float().sin().view(patches, shape.width)
    joined = torch.from_numpy(np.concatenate(places, 1))
    return [shown, *others], PackedImages(rows, torch.arange(count), joined, pixels, torch.tensor([grid]))


def logit_cap(config: Any) -> float | None:
    """Return the cap of the logits of a model of this Hugging Face configuration, or None if the model caps none."""
    cap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return cap


def hidden_states(decoder: Any, packed: PackedSequences, encoder: ImageEncoder | None = None) -> Tensor:
    """Compute the last hidden states [U, D], or this rank's part of them. The states of a sequence depend only on its
    tokens, and on its images if the model has an `encoder`.
    """
    ids, positions = packed.computed
    inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None]}
    if encoder is not None:
        inputs = encoder.inputs(ids, positions, packed.images)
    if decoder.config._attn_implementation == PACKED:
        inputs["layout"] = packed.layout
    output = decoder(use_cache=False, **inputs)
    states: Tensor = output.last_hidden_state[0]
    return states
