"""Expert parallelism: tokens travel to the ranks that hold their experts, so ranks need not gather all experts.

The S ranks that hold one copy of the model have the n experts of a layer in S equal parts, in their order, exactly as
FSDP would shard them. So files, checkpoints, pushes and optimizers need no change.

For the computation, the ranks form groups of E = learner.expert_ranks. S / E neighbouring ranks gather their parts, so
that each rank has n / E whole experts, and each group has all n. A token goes to the ranks of its own group that have
its experts, and their results come back. With E = S no expert is ever gathered.

The dtypes are the same as FSDP's. Parts are float32, and gathered experts are in the model's dtype. Gradients are added
up in float32 and divided by the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.errors import ConfigError
from asyncrl.learner.ranks.ranks import Ranks, sharded
from asyncrl.modelling.routers import extend


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroups:
    """The process groups of this rank in the mesh [replicas, E, S / E] of `size` ranks: `exchange` for tokens, `gather`
    for the parts of experts, and `copies` for gradients."""

    mesh: DeviceMesh
    size: int

    @property
    def exchange(self) -> dist.ProcessGroup:
        return self.mesh.get_group("experts")

    @property
    def gather(self) -> dist.ProcessGroup:
        return self.mesh.get_group("parts")

    @property
    def copies(self) -> dist.ProcessGroup:
        return self.mesh.get_group("replicas")

    @property
    def ranks(self) -> int:
        """The number E of ranks in a group that has all experts."""
        return self.mesh["experts"].size()


def spread_experts(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> set[nn.Parameter]:
    """Spread the stacked experts of a Hugging Face `model`, which is neither compiled nor sharded yet, over the ranks,
    if learner.expert_ranks is more than 1. The experts compute in `dtype`. Returns their parameters, which FSDP must
    ignore. Raises ConfigError if the model has no such experts, or if their number cannot be divided.
    """
    if ranks.expert_mesh is None:
        return set()
    groups = ExpertGroups(ranks.expert_mesh, ranks.size)
    found = spreadable_experts(model, groups.ranks)
    for experts in found:
        count = experts.num_experts
        if count % ranks.shards:
            key = f"learner.expert_ranks={groups.ranks}"
            raise ConfigError(f"{key}: {count} experts cannot be divided equally by the {ranks.shards} ranks of a copy")
        own: Any = copy.copy(experts)
        own.__dict__ = {**experts.__dict__, "_parameters": {}, "num_experts": count // groups.ranks}
        for name, parameter in list(experts.named_parameters()):
            experts.register_parameter(name, sharded(parameter, ranks))
        # A tuple hides the module, which has no parameters of its own, from FSDP and other code that lists modules.
        experts.spread = (own, groups, dtype)
    extend(found, _SpreadExperts)
    return {parameter for experts in found for parameter in experts.parameters()}


def spreadable_experts(model: nn.Module, size: int) -> list[Any]:
    """Return the stacked experts of each layer of a Hugging Face `model`. Raises ConfigError if it has none
    that learner.expert_ranks=`size` could spread."""
    key = f"learner.expert_ranks={size}"
    # transformers' decorator `use_experts_implementation` sets this attribute. Experts without it cannot be computed
    # apart from their routing.
    found: list[Any] = [each for each in model.modules() if hasattr(each, "_is_expert_parallel")]
    if not found and any(_is_stacked(each) for each in model.modules()):
        raise ConfigError(
            f"{key}: transformers {transformers.__version__}, which is installed, cannot compute the stacked experts "
            f"of a {type(model).__name__} apart from their routing; install a newer version, or use 1"
        )
    if not found:
        raise ConfigError(f"{key}: a {type(model).__name__} has no stacked experts that could be spread; use 1")
    for experts in found:
        if any(len(each) != experts.num_experts for each in experts.parameters()):
            raise ConfigError(f"{key}: experts of a {type(model).__name__} share weights; use 1")
        if experts.num_experts % size:
            raise ConfigError(f"{key}: {experts.num_experts} experts cannot be divided equally by {size} ranks")
    return found


def _is_stacked(module: nn.Module) -> bool:
    """True if a module has the matrices of several experts in one parameter."""
    count = getattr(module, "num_experts", None)
    return any(each.dim() == 3 and len(each) == count for each in module.parameters(recurse=False))


class _SpreadExperts:
    """The experts of a layer, spread over ranks. `spread` has a module of the same kind for this rank's experts, the
    groups, and the dtype. The module gets its weights in each pass."""

    spread: tuple[Any, ExpertGroups, torch.dtype]
    num_experts: int

    # Compiled graphs cannot have sizes that come from other ranks.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of the experts' outputs, given states [T, D], and for each token the indices
        and the weights [T, top_k] of its experts."""
        own, groups, dtype = self.spread
        tokens, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        # `arriving` has, for each rank of the group, the number of its tokens that go to each of this rank's experts.
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=groups.exchange)
        arriving = arriving.view(groups.ranks, -1)
        sent, received = torch.stack([counts.view(groups.ranks, -1).sum(1), arriving.sum(1)]).tolist()

        given = _Exchanged.apply(states[order // top_k], sent, received, groups.exchange)
        numbers = torch.arange(own.num_experts, device=states.device).repeat(groups.ranks)
        numbers = numbers.repeat_interleave(arriving.flatten(), output_size=len(given))
        parts = dict(self.named_parameters())  # type: ignore[attr-defined]
        for name, part in parts.items():
            setattr(own, name, _Gathered.apply(part.to_local(), dtype, states.device, groups))
        made = own(given, numbers[:, None], torch.ones_like(given[:, :1]))
        for name in parts:
            delattr(own, name)
        back = _Exchanged.apply(made, received, sent, groups.exchange)

        weighted = back * weights.flatten()[order][:, None]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        together: Tensor = weighted[place].view(tokens, top_k, -1).sum(1).to(states.dtype)
        return together


class _Exchanged(torch.autograd.Function):
    """Sends rows [sum of sent, D], `sent[i]` of them to rank i of a group. Returns the rows [sum of received, D] that
    the ranks sent to this rank. The gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.way), None, None, None


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class _Gathered(torch.autograd.Function):
    """Gathers the whole experts [n / E, ...] of a rank in `dtype` on `device`, from its rows `part` and its neighbours'
    rows. The backward pass adds up the gradients of all ranks, and divides by their number.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, dtype: torch.dtype, device: torch.device, groups: ExpertGroups) -> Tensor:
        ctx.groups, ctx.kept = groups, (part.shape, part.dtype, part.device)
        own, parts = part.to(device, dtype), dist.get_world_size(groups.gather)
        if parts == 1:
            # An autograd function must not return its own argument.
            return own.clone() if own is part else own
        whole = own.new_empty(parts * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own.contiguous(), group=groups.gather)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        groups, (shape, dtype, device) = ctx.groups, ctx.kept
        own = gradient.float().contiguous()
        if dist.get_world_size(groups.gather) > 1:
            whole, own = own, own.new_empty(shape)
            dist.reduce_scatter_tensor(own, whole, group=groups.gather)
        if dist.get_world_size(groups.copies) > 1:
            dist.all_reduce(own, group=groups.copies)
        return (own / groups.size).to(device, dtype), None, None, None
