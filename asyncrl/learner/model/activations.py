"""Chooses which activations the layers of a model keep for the backward pass.

A layer keeps only its input, or also the output of its attention, or everything. It computes the rest again in the
backward pass.

Attention is the costliest part to compute again if sequences are long, and its output is small. So a budget goes to the
outputs of attention first, and the rest of the budget to whole layers. The last layers of the model get the budget: the
backward pass frees their activations before it recomputes those of earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Kept(Enum):
    """The activations that a layer keeps."""

    INPUT = auto()
    ATTENTION = auto()
    ALL = auto()


class Activations:
    """Decides which activations the layers of one model keep: the fraction `share` of all, from 0 to 1. A token's
    output of attention has `width` elements.

    The first pass with gradients measures the size of activations: one of its layers keeps everything, and the other
    layers only their input. Ranks that compute a pass together must recompute the same layers. So each of them passes
    the size that it measured to `agree`, which returns the largest of these sizes.
    """

    def __init__(self, share: float, width: int, agree: Callable[[float], float] | None = None) -> None:
        self._share = share
        self._width = width
        self._agree = agree
        self._layers = 0
        self._attention = self._all = 0.0
        self._kept: list[Kept] = []

    @property
    def nbytes(self) -> float:
        """The bytes of activations for each token of a pass if all layers keep everything, without the inputs of the
        layers. It is 0 before the first pass."""
        return self._layers * self._all

    @property
    def share(self) -> float:
        """The part of their activations that the layers may keep, from 0 to 1."""
        return self._share

    def keep(self, share: float) -> None:
        """Keep this share from the next pass on."""
        self._share = share
        self._plan()

    def wrap(self, layer: nn.Module) -> None:
        """Apply the share to one more layer. Call this for the layers in their order."""
        layer.forward = partial(self._forward, layer, layer.forward, self._layers)
        self._layers += 1

    def wrap_tower(self, layer: nn.Module) -> None:
        """Make a layer that encodes images keep only its inputs, unless every layer keeps everything."""
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self._share >= 1:
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        layer.forward = run

    def _forward(self, layer: nn.Module, forward: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._share >= 1:
            return forward(*args, **kwargs)
        if not self._kept and index == self._layers - 1:
            return self._measure(layer, lambda: forward(*args, **kwargs), (args, kwargs))
        kept = self._kept[index] if self._kept else Kept.INPUT
        if kept is Kept.ALL:
            return forward(*args, **kwargs)
        contexts = _keep_attention if kept is Kept.ATTENTION else noop_context_fn
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return run(forward, *args, **kwargs)

    def _measure(self, layer: nn.Module, forward: Callable[[], Any], inputs: Any) -> Any:
        """Run the layer, which keeps everything, and measure the kept bytes without inputs and weights."""
        given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        known = {_storage(each) for each in (*given, *map(_local, layer.parameters()))}
        sizes: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in known:
                sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(see, lambda tensor: tensor):
            output = forward()
        states = given[0]
        measured = sum(sizes.values()) / states.shape[:-1].numel()
        self._all = measured if self._agree is None else self._agree(measured)
        self._attention = min(self._width * states.element_size(), self._all)
        self._plan()
        return output

    def _plan(self) -> None:
        if not self._all:
            return
        budget = self._share * self.nbytes
        attentions = min(self._layers, int(budget / self._attention))
        layers = min(attentions, int((budget - attentions * self._attention) / max(self._all - self._attention, 1e-9)))
        kept = [Kept.INPUT] * (self._layers - attentions) + [Kept.ATTENTION] * attentions
        self._kept = kept[: self._layers - layers] + [Kept.ALL] * layers


def attention_width(config: Any) -> int:
    """Return the number of elements of a token's attention output, over all heads, in a model of this Hugging Face
    configuration."""
    config = config.get_text_config()
    heads = int(config.num_attention_heads)
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _local(parameter: Tensor) -> Tensor:
    # FSDP has gathered its weights here. Other weights of several ranks are still DTensors.
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _keep_attention() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_kept_operators)
    return contexts


def _kept_operators(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operator)
    is_attention = "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
