"""Run under torchrun by test_gathering.py: gathers odd shards in small buckets and compares them with the whole."""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from asyncrl.learner.gathering import gather, plan_gather
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.weights.buckets import on_host


class Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, no rows at all, one dimension and three."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (7, 5), "b": (1, 3), "c": (13,), "d": (3, 2, 4), "e": (64, 64), "f": (0, 4)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def check(bucket_bytes: int, ranks: Ranks) -> None:
    model = Odd()
    model.tied = nn.Parameter(torch.randn(4))
    expected = {name: each.detach().clone().bfloat16() for name, each in model.named_parameters()}
    fully_shard(model, mesh=ranks.mesh, ignored_params={model.tied})
    got, largest = {}, 0
    parameters = dict(model.named_parameters())
    for filled in gather(parameters, plan_gather(parameters, torch.bfloat16, bucket_bytes), ranks):
        largest = max(largest, filled.flat.untyped_storage().nbytes())
        got |= on_host(filled)
    if ranks.rank == 0:
        assert got.keys() == expected.keys(), got.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert largest <= max(bucket_bytes, 64 * 64 * 2), largest
    else:
        assert got == {}
    ranks.barrier()


def main(bucket_bytes: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with joined() as ranks:
        check(bucket_bytes, ranks)
        # gloo's threads must end before the interpreter does, or they take it down.
        gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]))
