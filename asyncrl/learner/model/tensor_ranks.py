"""Tensor parallelism: groups of T = learner.tensor_ranks neighbouring ranks divide the matrices of each layer. No rank
ever has a whole matrix.

A block is the attention or the MLP of a layer. Within a block, rank t of a group computes the t-th part of the heads or
neurons, for all tokens of a pass. Outside of blocks it has the t-th part of the tokens, as with context parallelism.

Each rank of the group gathers all tokens before a block. It multiplies them by its rows of the block's first matrices,
and the result by its columns of the last matrix. After the block each rank gets the sum of all ranks' products for its
own tokens.

This is Megatron-LM with sequence parallelism (https://arxiv.org/abs/1909.08053 and https://arxiv.org/abs/2205.05198).
The model's plan in transformers tells how each matrix is divided. Each rank gathers the head and the embedding, and
applies them to its own tokens, so log-probs cover the whole vocabulary.

The gradient with respect to a parameter is the sum over ranks of the gradients from their tokens, heads and neurons. In
memory all ranks of a copy of the model have their rows of every matrix, as without tensor parallelism. So files,
checkpoints, pushes, norms of gradients and optimizers need no change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.learner.model.tensor_slices import Slices, sliced_product
from asyncrl.learner.ranks.ranks import Ranks, sharded
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.routers import extend

BY_ROWS, BY_COLUMNS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Names in transformers' plans for the ways to divide a matrix. The names refer to the transposed matrix: `colwise`
divides the rows."""


@dataclass(slots=True, eq=False)
class _Tokens:
    """The state that all blocks of a model share. `are_divided`: the ranks of `group` divide the tokens of the current
    pass."""

    group: ContextGroup
    are_divided: bool = False

    def see(self, _: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Update the state for the pass that begins. The decoder calls this hook before each pass."""
        layout = options.get("layout")
        self.are_divided = layout is not None and layout.group is not None


def divide_layers(model: Any, layers: Sequence[nn.Module], ranks: Ranks) -> set[nn.Parameter]:
    """Divide the matrices in the `layers` of a Hugging Face `model`, if learner.tensor_ranks is more than 1. The layers
    are neither compiled nor sharded yet. Returns the parameters of the matrices, which FSDP must ignore.

    Raises ConfigError: transformers has no plan for the model that divides all matrices of its layers, or the heads or
    neurons cannot be divided.
    """
    group = ranks.context
    if group is None or not group.divides_layers:
        return set()
    tokens, blocks = _Tokens(group), _checked_blocks(model, layers, group.size)
    divided = {parameter for block in blocks for parameter in block.divide(ranks)}
    for behaviour, modules in {
        _Block: [each.module for each in blocks],
        _First: [each for block in blocks for each in block.first],
        _Last: [block.last for block in blocks],
    }.items():
        for each in modules:
            each.tokens = tokens
        extend(modules, behaviour)
    model.base_model.register_forward_pre_hook(tokens.see, with_kwargs=True)
    return divided


def check_division(model: Any, size: int) -> None:
    """Raises ConfigError: learner.tensor_ranks=`size` cannot divide the layers of a Hugging Face `model` (see
    `divide_layers`). The model may be on the meta device."""
    _checked_blocks(model, model.get_decoder().layers if hasattr(model.get_decoder(), "layers") else (), size)


def _checked_blocks(model: Any, layers: Iterable[nn.Module], size: int) -> list[_Found]:
    """Return the blocks of the layers. Raises ConfigError: `size` ranks cannot divide them."""
    try:
        styles = _styles(model.base_model)
        blocks = [block for layer in layers for block in _blocks(layer, styles)]
        for block in blocks:
            block.check(size)
        if not blocks:
            raise ConfigError("has no layers that ranks can divide")
    except ConfigError as error:
        raise ConfigError(f"learner.tensor_ranks={size}: a {type(model).__name__} {error}; use 1") from error
    return blocks


def _styles(decoder: Any) -> dict[nn.Module, str]:
    """Return the style that transformers' plan gives to the modules of a decoder."""
    plan: dict[str, str] = getattr(decoder.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ConfigError("has no plan in transformers that divides its layers")
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style for pattern, style in plan.items()}
    return {
        module: style
        for name, module in decoder.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def _blocks(layer: nn.Module, styles: Mapping[nn.Module, str]) -> list[_Found]:
    """Return the attention and MLP blocks of a layer. Raises ConfigError: the layer has matrices outside of these
    blocks."""
    blocks = []
    for module in layer.modules():
        linear = [each for each in module.children() if isinstance(each, nn.Linear)]
        first = [each for each in linear if styles.get(each) == BY_ROWS]
        last = [each for each in linear if styles.get(each) == BY_COLUMNS]
        if first and len(last) == 1:
            blocks.append(_Found(module, first, last[0]))
    known = {each for block in blocks for each in (*block.first, block.last)}
    within = {each: block for block in blocks for each in block.module.modules()}
    for name, module in layer.named_modules():
        for parameter in module.parameters(recurse=False) if module not in known else ():
            # Norms over a token, or within attention over a head, are the same on all ranks.
            is_norm = parameter.dim() == 1 and (module not in within or len(parameter) == within[module].width)
            if not is_norm or styles.get(module, WHOLE) != WHOLE:
                raise ConfigError(f"has layers of which transformers' plan does not divide {name}")
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A block, which is attention or an MLP. It multiplies tokens by rows of the matrices `first`, and the result by
    columns of `last`."""

    module: Any
    first: Sequence[nn.Linear]
    last: nn.Linear

    @property
    def width(self) -> int:
        """The number of elements of one head, or 1 for a neuron."""
        return int(getattr(self.module, "head_dim", 1))

    @property
    def heads(self) -> int:
        """The number of query heads, or of neurons."""
        return self.last.in_features // self.width

    def check(self, size: int) -> None:
        """Raises ConfigError: `size` ranks cannot divide the heads or neurons."""
        what = "heads" if hasattr(self.module, "head_dim") else "neurons in an MLP"
        if self.heads % size:
            raise ConfigError(f"has {self.heads} {what}, which {size} ranks cannot divide equally")
        for linear in self.first:
            count = linear.out_features // self.width
            if count % size and (size % count or what != "heads"):
                raise ConfigError(
                    f"has {count} {what} of keys, which {size} ranks can neither divide equally nor repeat"
                )

    def divide(self, ranks: Ranks) -> Iterator[nn.Parameter]:
        """Divide the matrices, whose heads or neurons were checked, and yield their parameters."""
        assert ranks.context is not None
        size, heads = ranks.context.size, self.heads
        yield self._slice(self.last, "weight", 1, [rank * heads // size for rank in range(size)], heads // size, ranks)
        for linear in self.first:
            count = linear.out_features // self.width
            begins, each = [rank * count // size for rank in range(size)], max(1, count // size)
            yield self._slice(linear, "weight", 0, begins, each, ranks)
            if linear.bias is not None:
                yield self._slice(linear, "bias", 0, begins, each, ranks)
            if hasattr(self.module, "num_key_value_groups") and count < heads:
                self.module.num_key_value_groups = heads // size // each

    def _slice(self, linear: Any, name: str, dim: int, begins: Sequence[int], count: int, ranks: Ranks) -> nn.Parameter:
        bounds = [(begin * self.width, (begin + count) * self.width) for begin in begins]
        linear.slices = Slices.of(linear.out_features, dim, bounds, ranks)
        linear.register_parameter(name, sharded(getattr(linear, name), ranks))
        own: nn.Parameter = getattr(linear, name)
        return own


class _Block:
    """A divided block. Its first argument is the states [1, U / T, D] of this rank's tokens, or [1, U, D] of all
    tokens."""

    tokens: _Tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.tokens.are_divided and args:
            args = (self._gathered(args[0]), *args[1:])
        elif self.tokens.are_divided:
            kwargs["hidden_states"] = self._gathered(kwargs["hidden_states"])
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _gathered(self, states: Tensor) -> Tensor:
        return self.tokens.group.gather(states[0])[None]


class _First:
    """A first matrix with its bias. This rank's slice of the rows computes heads or neurons [1, U, out] from states [1,
    U, D]."""

    weight: Any
    bias: Any
    slices: Slices

    def forward(self, states: Tensor) -> Tensor:
        product = sliced_product(states, self.weight.to_local(), self.slices)
        if self.bias is None:
            return product
        one = states.new_ones(1, 1)
        return product + sliced_product(one, self.bias.to_local()[:, None], self.slices)


class _Last:
    """A last matrix. This rank multiplies heads or neurons [1, U, in] by its slice of the columns. The sum over ranks
    is [1, U / T, D] for this rank's tokens, or [1, U, D] for all tokens."""

    weight: Any
    bias: Tensor | None
    slices: Slices
    tokens: _Tokens

    def forward(self, own: Tensor) -> Tensor:
        part, group = sliced_product(own, self.weight.to_local(), self.slices), self.tokens.group
        total = group.sum_parts(part[0])[None] if self.tokens.are_divided else group.sum(part)
        return total if self.bias is None else total + self.bias
