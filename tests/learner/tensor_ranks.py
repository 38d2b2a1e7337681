"""Run as ranks by test_tensor_ranks.py: tiny models compute passes whose layers several ranks divide, and whole runs
are trained so. What came of it is written down."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import LearnerConfig, ModelConfig, TrainConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.model import tensor_slices
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.model.tensor_slices import Slices, gather_slice, sliced_product
from asyncrl.learner.ranks.ranks import Ranks, context_group, joined, shard_of
from asyncrl.learner.trainer import Trainer
from tests.learner import context_ranks
from tests.learner.context_ranks import TEMPERATURE, gradients, outputs, packed, write_family
from tests.learner.model.test_models_beside_the_policy import RepeatingReplay
from tests.learner.support import PlannedReplay, Run, make_config, random_sequences, with_critic
from tests.learner.two_ranks import fine_tuned, stop_one_of_two, with_frozen

UNEVEN = {"intermediate_size": 22}
"""Neurons that two ranks divide in other places than four ranks their rows."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3 4/2": UNEVEN | {"tie_word_embeddings": True},
    "qwen3 4/4": {"tie_word_embeddings": False},
    "llama 6/2": UNEVEN | {"tie_word_embeddings": False},
    "llama 4/1": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2 4/2": UNEVEN | {"tie_word_embeddings": False},
    "gemma2 4/2": UNEVEN,
}
"""Models by family, heads and heads of keys, with biases and without, and with one matrix for embedding and head."""
ARRANGEMENTS: dict[int, list[tuple[int, int, tuple[str, ...]]]] = {
    2: [(2, 1, ("qwen3 4/2", "llama 6/2", "llama 4/1"))],
    4: [
        (2, 1, ("qwen3 4/2", "llama 6/2", "qwen2 4/2", "gemma2 4/2")),
        (4, 1, ("llama 4/1", "qwen3 4/4")),
        (2, 2, ("llama 4/1",)),
    ],
}
"""By ranks: how many divide layers together, how many copies there are, and of which models passes are tried."""


def write_families(folder: Path) -> None:
    for name, values in FAMILIES.items():
        write_family(name, folder, **values)


def arranged(ranks: Ranks, together: int, replicas: int) -> Ranks:
    """The same ranks, of which so many `together` divide layers, with so many copies of a model."""
    group = context_group(ranks.rank, ranks.size, together, timedelta(seconds=60), divides_layers=True)
    shape = (replicas, ranks.size // replicas)
    mesh = (
        init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards"))
        if replicas > 1
        else ranks.mesh
    )
    return replace(ranks, context=group, mesh=mesh)


def check_slices(ranks: Ranks, together: int) -> None:
    """Slices of even and uneven rows, more ranks than rows, and slices that overlap, are those of the whole matrix, and
    so are gradients: each rank adds its own."""
    torch.manual_seed(0)
    for rows, columns, dim in ((8, 5, 0), (10, 4, 0), (4, 3, 0), (2, 6, 1), (9, 8, 1), (1, 4, 1)):
        length = (rows, columns)[dim]
        size = length // together
        bounds = [(rank * size, (rank + 1) * size) for rank in range(together)]
        if dim == 0 and rows == 4:
            bounds = [(1, 3)] * together
        whole, values = torch.randn(rows, columns), torch.randn(7, size if dim else columns)
        slices = Slices.of(rows, dim, bounds, ranks)
        mine = shard_of(rows, ranks.shard, ranks.shards)
        own = whole[mine.start : mine.stop].clone().requires_grad_()
        wanted = [whole[slice(*each)] if dim == 0 else whole[:, slice(*each)] for each in bounds]
        assert torch.equal(gather_slice(own.detach(), slices), wanted[ranks.rank % together])
        product = sliced_product(values, own, slices)
        torch.testing.assert_close(product, values @ wanted[ranks.rank % together].T)
        ((ranks.rank + 1) * product).sum().backward()
        expected = torch.zeros(rows, columns)
        for rank in range(ranks.size):
            begin, end = bounds[rank % together]
            part = expected.narrow(dim, begin, end - begin)
            part += (rank + 1) * values.sum(0) / ranks.size
        torch.testing.assert_close(own.grad, expected[mine.start : mine.stop])


@contextmanager
def watched() -> Iterator[list[int]]:
    """How many numbers each slice has that is gathered meanwhile."""
    sizes: list[int] = []
    gather = tensor_slices.gather_slice

    def watching(own: Tensor, slices: Slices) -> Tensor:
        found = gather(own, slices)
        sizes.append(found.numel())
        return found

    tensor_slices.gather_slice = watching
    try:
        yield sizes
    finally:
        tensor_slices.gather_slice = gather


def held(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """How many numbers of the matrices of its layers a rank gathers in a forward pass, all together and at most at a
    time; how many each matrix has; and the shapes of what FSDP gathers of a layer."""
    policy = load_policy(ModelConfig(str(folder)), TEMPERATURE, ranks, 64)
    matrices = [each.numel() for name, each in policy.named_parameters() if ".layers." in name and each.dim() == 2]
    layer, gathered = policy.model.model.layers[0], {}

    def see(module: nn.Module, _: Any) -> None:
        own = {name: each for name, each in module.named_parameters() if not isinstance(each, DTensor)}
        gathered.update({name: tuple(each.shape) for name, each in own.items()})

    layer.register_forward_pre_hook(see)
    with torch.no_grad(), watched() as sizes:
        policy(PackedSequences.of(random_sequences(5, 9)).divided(ranks.context).to(ranks.device))
    return {"all": sum(sizes), "largest": max(sizes), "matrices": matrices, "gathered": gathered}


def compiled(folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """The gradients of a compiled policy. No pass compiles a layer once the first ones have."""
    torch.compiler.set_default_backend("aot_eager")
    policy = load_policy(ModelConfig(str(folder), compile=True), TEMPERATURE, ranks, 96)
    algorithm, trained = Algorithm.from_config(TrainConfig().algorithm, 1), Trainable(policy, 1e-3, LearnerConfig())
    compile_passes(Trainer(ranks, algorithm, trained, None, None, threading.Event()), share_prefixes=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = accumulated(policy, ranks)
    torch.compiler.set_default_backend("inductor")
    return found


def accumulated(policy: Policy, ranks: Ranks) -> dict[str, Tensor]:
    """The gradients of passes of several lengths, with shared prefixes and without."""
    for lengths in ([3, 40], [7, 7, 21], [2]):
        sequences = random_sequences(33, *lengths)
        sequences = [torch.cat([sequences[0], each]) for each in sequences]
        for sharing in (None, EVERY):
            batch = PackedSequences.of(sequences, sharing).padded().divided(ranks.context)
            logprobs, _ = policy(batch.to(ranks.device))
            # Every group has this pass, and FSDP takes the mean over ranks.
            (ranks.context_size * torch.linspace(-1, 1, len(logprobs), device=ranks.device) * logprobs).sum().backward()
    return gradients(policy)


def in_bfloat16(folder: Path, ranks: Ranks) -> Tensor:
    """Log-probs [N]."""
    policy = load_policy(ModelConfig(str(folder), dtype="bfloat16"), TEMPERATURE, ranks, 64)
    with torch.no_grad():
        logprobs: Tensor = policy(packed("everywhere", ranks))[0]
    return logprobs.cpu()


def configs(model: Path, folder: Path) -> dict[str, TrainConfig]:
    """The runs of ranks that divide passes but for those of a mixture, one with a critic on the policy's backbone, and
    one with a frozen layer."""
    runs = {name: each for name, each in context_ranks.configs(model, folder).items() if name != "replayed"}
    odd = {"batch_size": 3, "group_size": 3, "steps": 2, "micro_tokens": 32}
    runs["shared"] = with_critic(make_config(model, folder / "shared", **odd))
    runs["shared"].critic.shared = True
    runs["frozen"] = with_frozen(make_config(model, folder / "frozen", **odd), "embeddings", "*.layers.0.*")
    runs["alike"].learner.exchange = runs["frozen"].learner.exchange = "update"
    runs["critic"].model.activations = 0.3
    return runs


def trained(model: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What the runs published and measured."""
    found = {}
    for name, config in configs(model, folder).items():
        replay = RepeatingReplay(config) if name == "implicit" else PlannedReplay(config, alike=name == "alike")
        run = Run(config, replay).train(ranks)
        found[name] = {"weights": run.weights, "metrics": run.metrics.rows}
    return found


def resumed(model: Path, folder: Path, ranks: Ranks) -> dict[int, dict[str, Tensor]]:
    """What the run "shared" publishes in one more step, from a copy of the checkpoint that one rank wrote."""
    if ranks.rank == 0:
        shutil.copytree(folder / "one" / "shared", folder / "copy" / "shared")
    ranks.barrier()
    return one_step_more(configs(model, folder / "copy")["shared"], ranks)


def one_step_more(config: TrainConfig, ranks: Ranks) -> dict[int, dict[str, Tensor]]:
    return Run(replace(config, learner=replace(config.learner, steps=config.learner.steps + 1))).train(ranks).weights


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    with joined() as alone:
        done: dict[Any, Any] = {}
        for together, replicas, families in ARRANGEMENTS[alone.size]:
            ranks = arranged(alone, together, replicas)
            check_slices(ranks, together)
            for family in families:
                done[together, replicas, family] = outputs(folder / family, ranks, 0.3)
            if (together, replicas) == (2, 1):
                done["held"] = held(folder / "llama 6/2", ranks)
                done["bfloat16"] = in_bfloat16(folder / "qwen3 4/2", ranks)
            if alone.size == 4 and together == 2 and replicas == 1:
                done["compiled"] = compiled(folder / "qwen3 4/2", ranks)
            if alone.size == 2:
                done["resumed"] = resumed(model, folder, ranks)
                done["fine-tuned"] = fine_tuned(model, folder / "2 ranks", ranks)
            done[together, replicas] = trained(model, folder / f"{alone.size} ranks, {together}, {replicas}", ranks)
            assert stop_one_of_two(model, folder / f"stopped {alone.size}, {together}, {replicas}", ranks)
        if alone.rank == 0:
            torch.save(done, folder / f"{alone.size}.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
