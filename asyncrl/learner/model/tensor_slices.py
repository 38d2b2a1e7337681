"""Products with a slice of a matrix: a rank stores some rows of the matrix, and computes with another part of it.

The S ranks that hold one copy of the model have the rows of a matrix in their order, exactly as FSDP would shard them.

For the computation, with T = learner.tensor_ranks, rank r has slice r % T of one dimension. The ranks exchange the rows
that each needs, for one matrix at a time, and drop them afterwards. The backward pass gets the slice again, and sends
its gradient back to the ranks that have the rows. Slices may overlap: the gradients of all ranks that have an element
are added up.

The dtypes are the same as FSDP's: rows are float32, and slices have the dtype of the computation. Gradients are added
up in float32 or better, and divided by the number of ranks. torch.compile sees custom operators, which keep no slice
for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.ranks.ranks import Ranks, shard_of
from asyncrl.modelling.context import process_group


class Slices(NamedTuple):
    """The division of a matrix of `rows` rows over the ranks that hold one copy of the model.

    - In a computation rank r has bounds[2t] to bounds[2t + 1] of dimension `dim`, with t = r % (len(bounds) / 2).
    - This rank is number `shard` of `shards`. A gradient is divided by `ranks`.
    - `copy` is torch's name for the process group of the ranks that hold this copy.
    - `copies` names the group of the ranks with the same rows in all copies; it is empty if there is only one copy.
    """

    rows: int
    dim: int
    shard: int
    shards: int
    ranks: int
    bounds: tuple[int, ...]
    copy: str
    copies: str

    @classmethod
    def of(cls, rows: int, dim: int, bounds: Sequence[tuple[int, int]], ranks: Ranks) -> Slices:
        """Return the slices of a whole matrix, given the begin and end of each."""
        assert ranks.mesh is not None
        names = [ranks.mesh.get_group(index).group_name for index in range(ranks.mesh.ndim)]
        flat = tuple(each for pair in bounds for each in pair)
        return cls(rows, dim, ranks.shard, ranks.shards, ranks.size, flat, names[-1], "".join(names[:-1]))

    @property
    def size(self) -> int:
        """The length of this rank's slice."""
        first = 2 * (self.shard % (len(self.bounds) // 2))
        return self.bounds[first + 1] - self.bounds[first]

    def flat(self) -> tuple[list[int], str, str]:
        """Return the fields in the form that an operator takes."""
        return [*self[:5], *self.bounds], self.copy, self.copies

    @classmethod
    def from_flat(cls, numbers: Sequence[int], copy: str, copies: str) -> Slices:
        """Return the slices from the result of `flat`."""
        rows, dim, shard, shards, ranks, *bounds = numbers
        return cls(rows, dim, shard, shards, ranks, tuple(bounds), copy, copies)


def sliced_product(values: Tensor, own: Tensor, slices: Slices) -> Tensor:
    """Multiply values [..., in] by the transpose of this rank's slice [out, in] of a matrix, of which this rank stores
    the rows `own`. All ranks of a copy call this."""
    product: Tensor = _product(values, own, True, *slices.flat())
    return product


@torch.library.custom_op("asyncrl::sliced_product", mutates_args=())
def _product(values: Tensor, own: Tensor, transposed: bool, numbers: Sequence[int], copy: str, copies: str) -> Tensor:
    slices = Slices.from_flat(numbers, copy, copies)
    matrix = gather_slice(own.to(values.device, values.dtype), slices)
    return values @ (matrix.t() if transposed else matrix)


@_product.register_fake
def _(values: Tensor, own: Tensor, transposed: bool, numbers: Sequence[int], copy: str, copies: str) -> Tensor:
    slices = Slices.from_flat(numbers, copy, copies)
    out, width = (slices.size, own.shape[1]) if slices.dim == 0 else (slices.rows, slices.size)
    return values.new_empty(*values.shape[:-1], out if transposed else width)


@torch.library.custom_op("asyncrl::sliced_gradient", mutates_args=())
def _gradient(
    of_product: Tensor, values: Tensor, own: Tensor, numbers: Sequence[int], copy: str, copies: str
) -> Tensor:
    """Compute the gradient with respect to the rows `own` from the gradient with respect to the product."""
    of_slice = of_product.flatten(0, -2).t() @ values.flatten(0, -2)
    of_own = _return_slice(of_slice, own.shape, Slices.from_flat(numbers, copy, copies))
    return of_own.to(own.device, own.dtype)


@_gradient.register_fake
def _(of_product: Tensor, values: Tensor, own: Tensor, numbers: Sequence[int], copy: str, copies: str) -> Tensor:
    return torch.empty_like(own)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, own, _, *ctx.slices = inputs
    ctx.save_for_backward(values, own)


def _back(ctx: Any, of_product: Tensor) -> tuple[Tensor | None, ...]:
    values, own = ctx.saved_tensors
    of_values = _product(of_product, own, False, *ctx.slices) if ctx.needs_input_grad[0] else None
    # A frozen matrix has no gradient.
    of_own = _gradient(of_product, values, own, *ctx.slices) if ctx.needs_input_grad[1] else None
    return of_values, of_own, None, None, None, None


_product.register_autograd(_back, setup_context=_save)


class _Plan(NamedTuple):
    """The exchange of rows by which a rank gets its slice.

    - `sent`: the part of this rank's rows that each rank gets, as a slice of the divided dimension.
    - `received`: the number of rows that come from each rank.
    - `moves` is false if every rank already has its slice.
    """

    sent: tuple[slice, ...]
    received: tuple[int, ...]
    moves: bool


@cache
def _plan(rows: int, dim: int, shard: int, shards: int, bounds: tuple[int, ...]) -> _Plan:
    slices = [range(*bounds[index : index + 2]) for index in range(0, len(bounds), 2)]
    owned = [shard_of(rows, rank, shards) for rank in range(shards)]
    wanted = [slices[rank % len(slices)] for rank in range(shards)]
    if dim == 1:
        return _Plan(tuple(slice(each.start, each.stop) for each in wanted), tuple(map(len, owned)), True)
    own = owned[shard]
    given = [_overlap(own, each) for each in wanted]
    sent = tuple(slice(each.start - own.start, each.stop - own.start) for each in given)
    return _Plan(sent, tuple(len(_overlap(each, wanted[shard])) for each in owned), owned != wanted)


def _overlap(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def gather_slice(own: Tensor, slices: Slices) -> Tensor:
    """Return this rank's slice of a matrix, in the dtype of `own`. `own` has the rows of the matrix that this rank
    stores. Returns `own` itself if every rank already stores exactly its slice. All ranks of a copy call this."""
    plan = _plan(slices.rows, slices.dim, slices.shard, slices.shards, slices.bounds)
    if not plan.moves:
        return own
    width = slices.size if slices.dim == 1 else own.shape[1]
    parts = [_part(own, slices.dim, each) for each in plan.sent]
    return _exchange(parts, [count * width for count in plan.received], slices).view(-1, width)


def _return_slice(of_slice: Tensor, shape: torch.Size, slices: Slices) -> Tensor:
    """Compute the gradient of this rank's rows, of this `shape`, from the gradients of the slices of all ranks."""
    plan = _plan(slices.rows, slices.dim, slices.shard, slices.shards, slices.bounds)
    total = of_slice.to(torch.promote_types(of_slice.dtype, torch.float32))
    if plan.moves:
        parts, total = total.split(list(plan.received)), total.new_zeros(shape)
        targets = [_part(total, slices.dim, each) for each in plan.sent]
        sizes = [each.numel() for each in targets]
        for target, part in zip(targets, _exchange(parts, sizes, slices).split(sizes), strict=True):
            target += part.view(target.shape)
    if slices.copies:
        total = total.contiguous()
        dist.all_reduce(total, group=process_group(slices.copies))
    return total / slices.ranks


def _part(rows: Tensor, dim: int, part: slice) -> Tensor:
    return rows[part] if dim == 0 else rows[:, part]


def _exchange(parts: Sequence[Tensor], counts: list[int], slices: Slices) -> Tensor:
    """Send a part to each rank of the copy, and return the elements that the ranks send: `counts[i]` from rank i."""
    sent = torch.cat([each.reshape(-1) for each in parts])
    received = sent.new_empty(sum(counts))
    sizes = [each.numel() for each in parts]
    dist.all_to_all_single(received, sent, counts, sizes, group=process_group(slices.copy))
    return received
