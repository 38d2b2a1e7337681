"""Inspects a model's attention, to decide if asyncrl's attention may replace it.

The learner and the embedded engine replace the attention of a Hugging Face model by asyncrl's, which must give the same
result. A model shows its kind of attention by the arguments that it gives to its attention function, and by the masks
that it builds. `inspect_attention` records both in a forward pass over four tokens. A mask is a function of two
positions, so it can be evaluated at any length.

Arguments and masks that this file does not know are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from asyncrl.errors import ConfigError

_INSPECTED = "asyncrl_inspected"
_TOKENS = 4
_ROWS = 64
_PLAIN = frozenset({"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"})
_PLAIN |= {"output_router_logits", "output_attentions", "output_hidden_states"}
"""Arguments that all of asyncrl's attentions obey, or that have no effect on them."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One attention of a model: its layer, its window (None: all tokens), and (heads, width) of its keys and values."""

    layer: int
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]


def inspect_attention(
    model: Any, length: int, allowed: Collection[str] = (), device: torch.device | None = None
) -> list[LayerAttention]:
    """Record the attentions of the causal language model `model`, in the order of a forward pass.

    The result is valid for passes over at most `length` tokens. The recording pass runs on `device`, by default the
    device of the model's parameters. Afterwards, call the model's `set_attn_implementation` again. `allowed` has
    further arguments that are accepted, such as `softcap` (a cap of the scores) or `s_aux` (attention sinks).

    Raises ConfigError: a layer has no attention (state-space and linear attention, convolutions), or its attention
    does more than look back causally over all tokens or a window of them.
    """
    inspection = _Inspection(length, allowed)
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise ConfigError("its attention scales queries by their index in the pass, not in their sequence")
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Conv1d):
            raise ConfigError(f"{name} convolves neighbouring tokens")
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device or model.device)
    try:
        model.set_attn_implementation(_INSPECTED)
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False, inspection=inspection)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"its attention cannot be replaced ({type(error).__name__}: {error})") from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    attending = len({each.layer for each in inspection.found})
    if attending != layers:
        raise ConfigError(f"{layers - attending} of its {layers} layers have no attention that could be replaced")
    return inspection.found


class _Inspection:
    """The attentions found so far in one forward pass. Each attention gets this object as an argument. The class is not
    a dataclass, because FSDP copies dataclasses, and the copies would get the results."""

    def __init__(self, length: int, allowed: Collection[str]) -> None:
        self.length = length
        self.allowed = allowed
        self.found: list[LayerAttention] = []

    def see(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        layer = int(getattr(module, "layer_idx", len(self.found)))
        given = {name for name, option in options.items() if option is not None}
        if unknown := sorted(given - _PLAIN - set(self.allowed)):
            raise ConfigError(f"the attention of layer {layer} takes {', '.join(unknown)}")
        if mask is None and not _is_causal(module, options):
            raise ConfigError(f"layer {layer} sees later tokens")
        window = min(options.get("sliding_window") or self.length, self.length)
        shown = window if mask is None else self._shown(mask)
        if shown is None:
            raise ConfigError(
                f"layer {layer} has a mask that is neither causal nor a sliding window within {self.length} tokens, "
                "as in chunked attention"
            )
        if shown != window:
            raise ConfigError(f"layer {layer} masks all but {shown} tokens, and passes a sliding window of {window}")
        keys, values = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        self.found.append(LayerAttention(layer, window if window < self.length else None, keys, values))

    def _shown(self, mask: Tensor) -> int | None:
        function = getattr(mask, "function", None)
        return None if function is None else _window_of(function, self.length, mask.device)


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    passed = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if passed is None else passed)


def _window_of(function: Callable[..., Tensor], length: int, device: torch.device) -> int | None:
    """The window of a sliding-window mask, found by evaluating it over `length` tokens. None if the mask is no such
    window."""
    rows = torch.linspace(0, length - 1, min(length, _ROWS), device=device).long()[:, None]
    columns = torch.arange(length, device=device)[None]
    zero = columns.new_zeros(())
    seen = function(zero, zero, rows, columns).expand(len(rows), length)
    window = int(seen[-1].sum())
    expected = (columns <= rows) & (columns > rows - window)
    return window if torch.equal(seen, expected) else None


def _inspected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inspection: _Inspection | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if inspection is not None:
        inspection.see(module, key, value, attention_mask, options)
    batch, heads, tokens = query.shape[:3]
    return query.new_zeros(batch, tokens, heads, value.shape[3]), None


def _inspected_mask(*, mask_function: Callable[..., Tensor], device: torch.device, **_: Any) -> Tensor:
    # The mask is of bools, because FSDP would cast a floating point mask.
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.function = mask_function  # type: ignore[attr-defined]
    return mask


def longest_plain(config: Any) -> int:
    """The largest length of an input whose positions are encoded as those of shorter inputs; sys.maxsize if the length
    never changes how positions are encoded.

    With rotary embeddings of type longrope, a whole pass is encoded differently once one of its sequences is longer
    than the original length. For dynamic rotary embeddings the result is 0: transformers scales them by the longest
    input, and servers always scale them.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = [sys.maxsize]
    for each in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        kind = str(each.get("rope_type") or each.get("type") or "")
        if kind in ("longrope", "su"):
            original = each.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or 0)
        elif "dynamic" in kind:
            limits.append(0)
    return min(limits)


def check_positions(config: Any, length: int) -> None:
    """Raises ConfigError: the positions of an input of `length` tokens may be encoded differently from those of a
    shorter input."""
    if length > (longest := longest_plain(config)):
        raise ConfigError(
            "its rotary embeddings (longrope or dynamic) depend on the longest sequence of a pass"
            + (f" if a sequence has more than {longest} tokens, and {length} are needed" if longest else "")
        )


@torch.no_grad()
def check_same_logits(expected: Tensor, got: Tensor, dtype: torch.dtype, reason: str) -> None:
    """Raises ConfigError with `reason`: two sets of logits [N, V] differ by more than rounding errors of `dtype`."""
    first, second = expected.float().log_softmax(-1), got.float().log_softmax(-1)
    divergence = float((first.exp() * (first - second)).sum(-1).max())
    if dtype == torch.float16 and not bool(got.isfinite().all()):
        raise ConfigError("its values overflow float16; set model.dtype=bfloat16")
    if not divergence < (1e-5 if dtype == torch.float32 else 0.05):
        raise ConfigError(f"{reason}: the KL divergence from its own forward pass is {divergence:.2g}")


AttentionInterface.register(_INSPECTED, _inspected_attention)
AttentionMaskInterface.register(_INSPECTED, _inspected_mask)
