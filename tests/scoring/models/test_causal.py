import copy

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

from asyncrl.scoring.models.causal import CausalReader, linear
from asyncrl.scoring.models.encoding import Encoded
from tests.scoring.models.support import HIDDEN, SHAPE


class Counting(torch.nn.Module):
    """A backbone that counts the tokens that it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Qwen2Model(Qwen2Config(**SHAPE))
        self.config, self.device = copy.deepcopy(self.inner.config), torch.device("cpu")
        self.passes = []

    def forward(self, **inputs):
        self.passes.append(tuple(inputs["input_ids"].shape))
        return self.inner(**inputs)


@pytest.fixture
def backbone():
    return Counting()


WEIGHT = torch.linspace(-1, 1, HIDDEN)
PROMPT = list(range(100))


def reader(backbone, micro_tokens=10_000, pass_cost=1024, micro_inputs=None):
    made = CausalReader(backbone, linear(WEIGHT), micro_tokens, micro_inputs=micro_inputs)
    made.pass_cost = pass_cost
    return made


def members(count):
    return [Encoded([*PROMPT, *[7 + member] * 10], [[104], [105, 109]]) for member in range(count)]


def test_a_prompt_that_a_group_shares_is_computed_once_and_scores_the_same(backbone):
    inputs = members(8)
    shared = reader(backbone, pass_cost=1).read(inputs)
    assert backbone.passes == [(1, 100), (8, 10)]
    alone = [reader(backbone).read([each])[0] for each in inputs]
    np.testing.assert_allclose(shared, alone, atol=1e-4)


@pytest.mark.slow
def test_micro_batches_of_a_group_share_one_prompt(backbone):
    bounded = reader(backbone, 440, pass_cost=1).read(members(8))
    assert backbone.passes == [(1, 100), (4, 10), (4, 10)]
    np.testing.assert_allclose(bounded, reader(backbone).read(members(8)), atol=1e-4)


def test_a_pass_has_no_more_inputs_than_the_configuration_says(backbone):
    bounded = reader(backbone, pass_cost=1, micro_inputs=3).read(members(8))
    assert sorted(rows for rows, _ in backbone.passes) == [1, 2, 3, 3]
    np.testing.assert_allclose(bounded, reader(backbone).read(members(8)), atol=1e-4)


def test_nothing_is_shared_that_costs_more_than_it_saves(backbone):
    reader(backbone, pass_cost=700).read(members(8))
    assert backbone.passes == [(8, 110)]


def test_a_backbone_with_another_memory_than_attention_shares_nothing(backbone):
    backbone.config.layer_types = ["linear_attention", "full_attention"]
    reader(backbone, pass_cost=1).read(members(3))
    assert backbone.passes == [(3, 110)]


def test_what_follows_the_last_read_is_not_computed(backbone):
    reader(backbone).read([Encoded(PROMPT, [[9]])])
    assert backbone.passes == [(1, 10)]


def test_a_step_adds_up_what_is_read_at_its_positions_and_one_without_any_is_zero(backbone):
    made = reader(backbone)
    (apart,) = made.read([Encoded(PROMPT, [[3], [5], [8]])])
    (together,) = made.read([Encoded(PROMPT, [[3, 5], [], [8]])])
    np.testing.assert_allclose(together, [apart[0] + apart[1], 0, apart[2]], atol=1e-4)
    assert [each.shape for each in made.read([Encoded([], []), Encoded([1], [])])] == [(0,), (0,)]
