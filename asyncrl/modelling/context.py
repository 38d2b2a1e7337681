"""Context parallelism: the ranks of a group divide the tokens of a forward pass into equal parts.

Everything in a model except attention works on each token separately. Before attention, a rank has all heads for its
tokens. An exchange then gives it all tokens for its share of the heads. After attention the ranks exchange back
(DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509). If the heads cannot be divided equally, each rank gathers the
keys and values of all tokens for its queries.

With tensor parallelism the ranks of a group also divide the matrices of the layers: attention and MLPs compute all
tokens of the pass, for this rank's heads and neurons (see learner/model/tensor_ranks.py).

The exchanges are custom operators, so that torch.compile accepts them. They get the process group by its name, since
operators cannot take objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of torch with this name."""
    # torch's functional collectives find groups by their names in the same way.
    return _resolve_process_group(name)  # type: ignore[arg-type]


class ContextGroup(NamedTuple):
    """A group of `size` ranks that compute passes together.

    - `name`: torch's name of the process group
    - `rank`: this process's rank in the group
    """

    name: str
    size: int
    rank: int
    divides_layers: bool = False
    """True if the ranks also divide the matrices of the layers."""

    def rows(self, tokens: int) -> slice:
        """This rank's slice of a pass of `tokens` tokens; `tokens` is a multiple of `size`."""
        part = tokens // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def largest(self, value: float) -> float:
        """The largest of the values that the ranks give. All ranks of the group must call this together."""
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=process_group(self.name))
        return float(values)

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over the group's ranks, without gradient."""
        total = values.detach().clone()
        dist.all_reduce(total, group=process_group(self.name))
        return total

    def gather(self, values: Tensor) -> Tensor:
        """Gather the values [U, ...] of all tokens from each rank's part [U / size, ...]."""
        gathered: Tensor = gather_parts(values, self.name, self.size)
        return gathered

    def sum_parts(self, values: Tensor) -> Tensor:
        """Sum the ranks' values [U, ...]. Returns only this rank's part [U / size, ...] of the sum."""
        part: Tensor = sum_parts(values, self.name, self.size)
        return part

    def divides(self, heads: int) -> bool:
        """True if `heads` heads can be divided equally among the ranks."""
        return heads % self.size == 0

    def own(self, of_heads: Tensor) -> Tensor:
        """This rank's share of a tensor [heads, ...]."""
        own: Tensor = of_heads.unflatten(0, (self.size, -1))[self.rank]
        return own

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Exchange query, key and value [U / size, heads, D]. This rank gives its tokens, with all heads.

        Returns all U tokens for this rank's heads: [U, heads of the rank, D]. If the key heads cannot be divided
        equally among the ranks, they are repeated until they can.
        """
        repeats = 1
        # A loop, because torch.compile does not know functions such as lcm.
        while not self.divides(repeats * key.shape[1]):
            repeats += 1
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        parts = [each.unflatten(1, (self.size, -1)) for each in (query, key, value)]
        sent = torch.cat([each.flatten(2).transpose(0, 1) for each in parts], 2)
        received = exchange(sent.contiguous(), self.name).flatten(0, 1)
        widths = [each.shape[2] * each.shape[3] for each in parts]
        heads = zip(received.split(widths, 1), parts, strict=True)
        return [each.unflatten(1, tuple(part.shape[2:])) for each, part in heads]

    def to_tokens(self, values: Tensor) -> Tensor:
        """Exchange the values [U, heads of the rank, D]. This rank gives all tokens, for its heads.

        Returns this rank's tokens for all heads: [U / size, heads, D].
        """
        received: Tensor = exchange(values.unflatten(0, (self.size, -1)).contiguous(), self.name)
        return received.transpose(0, 1).flatten(1, 2)

    def collect(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """Collect the values [P] of each rank into one tensor [count]. A rank's values are put at its `places`
        int64[P], which must differ from the places of all other ranks."""
        # All ranks have the whole result, and compute the same from it. So the gradient with respect to a rank's values
        # is the gradient with respect to the result, read at the rank's places.
        collected: Tensor = _Collected.apply(values, places, count, self.name)
        return collected


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: str) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(count).index_copy_(0, places, values)
        dist.all_reduce(whole, group=process_group(group))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return of_whole[places], None, None, None


@torch.library.custom_op("asyncrl::exchange", mutates_args=())
def exchange(values: Tensor, group: str) -> Tensor:
    """Send each rank of the group its part of `values` [size, ...]. Returns the parts that the ranks send to this
    rank."""
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=process_group(group))
    return received


@exchange.register_fake
def _(values: Tensor, group: str) -> Tensor:
    return torch.empty_like(values)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.group = inputs


def _exchange_back(ctx: Any, of_received: Tensor) -> tuple[Tensor | None, ...]:
    return exchange(of_received.contiguous(), *ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_save_group)


@torch.library.custom_op("asyncrl::gather_parts", mutates_args=())
def gather_parts(values: Tensor, group: str, size: int) -> Tensor:
    """Concatenate the values [u, ...] of all ranks of the group to [size * u, ...]."""
    gathered = values.new_empty(_times(values, size))
    # The first name is that of torch 2.13 and newer, the second that of older versions.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, values.contiguous(), group=process_group(group))
    return gathered


@gather_parts.register_fake
def _(values: Tensor, group: str, size: int) -> Tensor:
    return values.new_empty(_times(values, size))


@torch.library.custom_op("asyncrl::sum_parts", mutates_args=())
def sum_parts(values: Tensor, group: str, size: int) -> Tensor:
    """Sum the ranks' values [size * u, ...] in float32 or better. Returns only this rank's part [u, ...] of the sum."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)).contiguous()
    total = wide.new_empty(_share(wide, size))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(total, wide, group=process_group(group))
    return total.to(values.dtype)


@sum_parts.register_fake
def _(values: Tensor, group: str, size: int) -> Tensor:
    return values.new_empty(_share(values, size))


def _sum_back(ctx: Any, of_gathered: Tensor) -> tuple[Tensor | None, ...]:
    return sum_parts(of_gathered, *ctx.group), None, None


def _gather_back(ctx: Any, of_part: Tensor) -> tuple[Tensor | None, ...]:
    return gather_parts(of_part, *ctx.group), None, None


gather_parts.register_autograd(_sum_back, setup_context=_save_group)
sum_parts.register_autograd(_gather_back, setup_context=_save_group)


def _times(values: Tensor, size: int) -> Sequence[int]:
    return (size * values.shape[0], *values.shape[1:])


def _share(values: Tensor, size: int) -> Sequence[int]:
    return (values.shape[0] // size, *values.shape[1:])
