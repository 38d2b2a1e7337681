from __future__ import annotations

import pytest
import torch
from torch import nn

from asyncrl.learner.gathering import gather, plan_gather
from asyncrl.learner.ranks import Ranks
from asyncrl.modelling.weight_format import WeightFormat, model_tensors
from asyncrl.weights.buckets import on_host
from tests.learner.support import launch


@pytest.mark.parametrize("ranks", [3])
def test_shards_of_any_shape_and_stacked_experts_come_out_as_they_are_saved_bucket_by_bucket(ranks: int):
    launch("tests.learner.gathered_ranks", ranks, "256")


def test_later_buckets_and_steps_leave_tensors_on_the_host_alone(ranks: Ranks):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    got = {}
    published = WeightFormat(model)
    for filled in gather(model_tensors(model), plan_gather(published, torch.float32, 64), published, ranks):
        got |= on_host(filled)
    for each in model.parameters():
        nn.init.zeros_(each)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
