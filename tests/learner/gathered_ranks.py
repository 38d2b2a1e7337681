"""Run as ranks by test_gathering.py: gathers shards in small buckets and compares them with the whole."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from asyncrl.learner.gathering import gather, plan_gather
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.modelling.weight_format import Shapes, WeightFormat, model_tensors
from asyncrl.weights.buckets import Bucket, Entry, on_host
from tests.mixtures import MIXTURES, mixture


class Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, no rows at all, one dimension and three."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (7, 5), "b": (1, 3), "c": (13,), "d": (3, 2, 4), "e": (64, 64), "f": (0, 4)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def gathered(model: Any, published: WeightFormat, bucket_bytes: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    largest = max(part_bytes(part.published) for part in published.parts)
    for filled in gather(model_tensors(model), plan_gather(published, torch.bfloat16, bucket_bytes), published, ranks):
        assert filled.flat.untyped_storage().nbytes() <= max(bucket_bytes, largest)
        got |= on_host(filled)
    return got


def part_bytes(shapes: Shapes) -> int:
    return Bucket(tuple(Entry(name, "float32", shape) for name, shape in shapes.items())).nbytes


def check_odd_shards(bucket_bytes: int, ranks: Ranks) -> None:
    model = Odd()
    model.tied = nn.Parameter(torch.randn(4))
    expected = {name: each.detach().clone().bfloat16() for name, each in model.named_parameters()}
    published = WeightFormat(model)
    fully_shard(model, mesh=ranks.mesh, ignored_params={model.tied})
    got = gathered(model, published, bucket_bytes, ranks)
    if ranks.rank == 0:
        assert got.keys() == expected.keys(), got.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    else:
        assert got == {}
    ranks.barrier()


def check_experts(family: str, bucket_bytes: int, ranks: Ranks) -> None:
    """What is gathered of stacked experts is what `save_pretrained` writes of the whole model."""
    model = mixture(family)
    published = WeightFormat(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # The other ranks write none.
        expected = load_file(Path(folder) / "model.safetensors") if ranks.rank == 0 else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    got = gathered(model, published, bucket_bytes, ranks)
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor if "correction_bias" in name else tensor.bfloat16()), name
    ranks.barrier()


def main(bucket_bytes: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with joined() as ranks:
        check_odd_shards(bucket_bytes, ranks)
        for family in MIXTURES:
            check_experts(family, bucket_bytes, ranks)
        # gloo's threads must end before the interpreter does, or they take it down.
        gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
