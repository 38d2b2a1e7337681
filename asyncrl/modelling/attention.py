"""What a model's attention does, and causal attention over packed sequences in its place.

The learner and the embedded engine replace the attention of a Hugging Face model with their own, which must give the
same result. A model shows what its attention does by the arguments that it passes to it, and by the masks that it
builds. `inspect_attention` catches both in a pass over four tokens: a mask is a function of two positions, so that it
can be evaluated at any length. An argument or a mask that is not known here is refused.

`PACKED` is the name of the packed attention in transformers. A mask over N packed tokens costs O(N^2); here each
sequence attends to itself only. On GPUs in half precision cuDNN takes long sequences, and a variable-length kernel the
others (of 32 and 8 heads of 128 and 16k tokens, on an H200: 650 TFLOP/s forward and 507 backward against 337 and 307).
Elsewhere it goes sequence by sequence. Measured on one CPU thread with a 1.7M-parameter model and sequences of 60 to
240 tokens, forward and backward: 5.4k tokens/s, against 4.8k with padded attention, 3.7k with everything padded, and
3.1k and 2.0k with masks over 1024 and 2048 packed tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from asyncrl.errors import ConfigError

PACKED = "asyncrl_packed"
LONG = 1024
"""Tokens from which a sequence goes to cuDNN."""
_INSPECTED = "asyncrl_inspected"
_TOKENS = 4
_ROWS = 64
_PLAIN = frozenset({"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"})
_PLAIN |= {"output_router_logits", "output_attentions", "output_hidden_states"}
"""Arguments that each of our attentions honours, or that change nothing in it."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One attention of a model: its layer, how many of the latest tokens a token sees (None: all), and the heads and
    width of its keys and of its values."""

    layer: int
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]


def inspect_attention(model: Any, length: int, allowed: Collection[str] = ()) -> list[LayerAttention]:
    """The attentions of the causal language model `model`, in the order of a forward pass over at most `length` tokens.

    Afterwards the model needs another `set_attn_implementation`. Raises ConfigError where a layer has no attention
    (state-space and linear attention, convolutions). Raises it as well where an attention does more than look back
    causally, over all tokens or a window of them. The arguments in `allowed` are taken all the same: for example
    `softcap`, a cap of the scores, or `s_aux`, attention sinks.
    """
    inspection = _Inspection(length, allowed)
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise ConfigError("its attention scales queries by their index in the pass, not in their sequence")
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Conv1d):
            raise ConfigError(f"{name} convolves neighbouring tokens")
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(_INSPECTED)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, inspection=inspection)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"its attention cannot be replaced ({type(error).__name__}: {error})") from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    attending = len({each.layer for each in inspection.found})
    if attending != layers:
        raise ConfigError(f"{layers - attending} of its {layers} layers have no attention that could be replaced")
    return inspection.found


@dataclass(slots=True)
class _Inspection:
    """The attentions found so far in one forward pass; given to each of them as an argument."""

    length: int
    allowed: Collection[str]
    found: list[LayerAttention] = field(default_factory=list)

    def see(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        layer = int(getattr(module, "layer_idx", len(self.found)))
        given = {name for name, option in options.items() if option is not None}
        if unknown := sorted(given - _PLAIN - set(self.allowed)):
            raise ConfigError(f"the attention of layer {layer} takes {', '.join(unknown)}")
        if mask is None and not _is_causal(module, options):
            raise ConfigError(f"layer {layer} sees tokens that follow")
        window = min(options.get("sliding_window") or self.length, self.length)
        shown = window if mask is None else self._shown(mask)
        if shown is None:
            raise ConfigError(
                f"layer {layer} has a mask of its own, neither causal nor a sliding window, within {self.length} "
                "tokens (chunked attention is such a one)"
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
    """How many of the latest tokens a mask function shows within `length` tokens; None where it shows others."""
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
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.function = mask_function  # type: ignore[attr-defined]
    return mask


def longest_plain(config: Any) -> int:
    """The longest input whose positions are encoded as in a shorter one; sys.maxsize where that holds for all.

    With rotary embeddings of type longrope a whole pass is encoded differently once one of its sequences is longer than
    the original length. For dynamic ones the answer is 0: transformers scales them by the longest input, servers
    always.
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
    """Raises ConfigError: an input of `length` tokens may encode positions differently than a shorter one."""
    if length > (longest := longest_plain(config)):
        raise ConfigError(
            "its rotary embeddings (longrope or dynamic) depend on the longest sequence of a pass"
            + (f" where one has more than {longest} tokens, and {length} are needed" if longest else "")
        )


@torch.no_grad()
def check_same_logits(expected: Tensor, got: Tensor, dtype: torch.dtype, reason: str) -> None:
    """Raises ConfigError with `reason`: two sets of logits [N, V] differ by more than rounding in `dtype` explains."""
    first, second = expected.float().log_softmax(-1), got.float().log_softmax(-1)
    divergence = float((first.exp() * (first - second)).sum(-1).max())
    if not divergence < (1e-5 if dtype == torch.float32 else 0.05):
        raise ConfigError(f"{reason}: KL to its own forward is {divergence:.2g}")


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive sequences that one kernel takes: `query_ends` and `key_ends` int32[count + 1] are the bounds of their
    `queries` and `keys` within the run. Where there is a `width`, cuDNN takes them one by one, each padded to so many
    tokens."""

    queries: list[int]
    keys: list[int]
    width: int | None
    query_ends: Tensor
    key_ends: Tensor


@dataclass(slots=True, eq=False)
class PackedLayout:
    """How the tokens of a pass attend to each other, and the `runs` in which kernels for GPUs take them.

    A sequence has as many `queries` as tokens are computed for it, and as many `keys` as tokens there are from its
    beginning to the last of these; the queries are the last of the keys. Where sequences share prefixes, `paths`
    int64[sum of keys] are the rows of these keys among the tokens of the pass; else a token is the key that it is the
    query of.

    Only `packed_attention` looks into it, so that no layer is compiled again for other lengths; a frozen class would be
    looked into.
    """

    queries: list[int]
    keys: list[int]
    paths: Tensor | None
    runs: list[_Run]

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None, paths: Tensor | None = None) -> PackedLayout:
        """The layout on the host of sequences that follow each other."""
        pairs = list(zip(queries, queries if keys is None else keys, strict=True))
        runs = [_run(width, list(members)) for width, members in groupby(pairs, lambda pair: _width(*pair))]
        return cls(list(queries), [each for _, each in pairs], paths, runs)

    def to(self, device: torch.device) -> PackedLayout:
        """The same on `device`; the host does not wait for it."""
        runs = [
            replace(run, query_ends=send(run.query_ends, device), key_ends=send(run.key_ends, device))
            for run in self.runs
        ]
        return replace(self, paths=None if self.paths is None else send(self.paths, device), runs=runs)


def _run(width: int | None, pairs: Sequence[tuple[int, int]]) -> _Run:
    queries, keys = ([each[side] for each in pairs] for side in range(2))
    bounds = (torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in (queries, keys))
    return _Run(queries, keys, width, *bounds)


def _width(queries: int, keys: int) -> int | None:
    """To how many tokens a sequence for cuDNN is padded; None where cuDNN does not take it. cuDNN prepares itself for
    every width anew, which takes longer than a pass, so there are few: four between a number and its double.

    cuDNN computes the rows of a shared prefix, too, which the variable-length kernel leaves out at half the speed.
    """
    if keys < LONG or 2 * (keys - queries) ** 2 > keys**2:
        return None
    step = 1 << (keys.bit_length() - 3)
    return -(-keys // step) * step


def send(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; the host does not wait until it is there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention [1, U, heads, D] of query [1, heads, U, D] over key and value [1, kv heads, U, D].

    For models that `inspect_attention` takes.
    """
    if layout.paths is not None:
        key, value = key.index_select(2, layout.paths), value.index_select(2, layout.paths)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        queries, keys = ([sum(getattr(run, side)) for run in layout.runs] for side in ("queries", "keys"))
        parts = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), layout.runs, strict=True)
        outputs = [_one_run(q[0], k[0], v[0], run, scaling, sliding_window) for q, k, v, run in parts]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None
    queries, keys = layout.queries, layout.keys
    sequences = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    outputs = [_one_sequence(q, k, v, scaling, sliding_window) for q, k, v in sequences]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if queries == keys and (window is None or keys <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    # Where a prefix is shared, the queries are the last of the keys.
    at = torch.arange(keys, device=query.device)
    distance = at[keys - queries :, None] - at
    mask = (distance >= 0) & (distance < (keys if window is None else window))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def _one_run(query: Tensor, key: Tensor, value: Tensor, run: _Run, scaling: float | None, window: int | None) -> Tensor:
    """Attention [n, heads, D] of query [heads, n, D] over key and value [kv heads, m, D], the queries and keys of one
    run."""
    if run.width is None or (window is not None and max(run.keys) > window):
        return _flash(query, key, value, run, scaling, window)
    sequences = zip(query.split(run.queries, 1), key.split(run.keys, 1), value.split(run.keys, 1), strict=True)
    return torch.cat([padded_attention(q, k, v, run.width, scaling) for q, k, v in sequences])


def padded_attention(query: Tensor, key: Tensor, value: Tensor, width: int, scaling: float | None) -> Tensor:
    """Causal attention [n, heads, D] of query [heads, n, D], the last of m tokens, over key and value [kv heads, m, D],
    computed over `width` >= m tokens by cuDNN, or by the flash kernel where cuDNN is missing or refuses these heads."""
    queries, keys = query.shape[1], key.shape[1]
    first, behind = keys - queries, width - keys
    # A causal kernel shows no padding to the tokens before it.
    rows = [F.pad(each, (0, 0, ahead, behind))[None] for each, ahead in ((query, first), (key, 0), (value, 0))]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        output: Tensor = F.scaled_dot_product_attention(
            rows[0], rows[1], rows[2], is_causal=True, scale=scaling, enable_gqa=True
        )
    return output[0, :, first:keys].transpose(0, 1)


def _flash(query: Tensor, key: Tensor, value: Tensor, run: _Run, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Older versions of torch have the kernel without shared heads of keys and values.
    grouped = "enable_gqa" in signature(varlen_attn).parameters
    shared, options = (1, {"enable_gqa": True}) if grouped else (query.shape[0] // key.shape[0], {})
    # The kernel's mask is aligned at the last query and the last key.
    output = varlen_attn(
        query.transpose(0, 1).contiguous(),
        key.transpose(0, 1).repeat_interleave(shared, 1).contiguous(),
        value.transpose(0, 1).repeat_interleave(shared, 1).contiguous(),
        run.query_ends,
        run.key_ends,
        max(run.queries),
        max(run.keys),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,  # type: ignore[arg-type]
    )
    assert isinstance(output, Tensor)
    return output


AttentionInterface.register(_INSPECTED, _inspected_attention)
AttentionMaskInterface.register(_INSPECTED, _inspected_mask)
AttentionInterface.register(PACKED, packed_attention)
