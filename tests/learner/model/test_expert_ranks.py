"""Experts that ranks cannot divide are refused. test_divided_ranks.py compares those that they can."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learner.model.expert_ranks import spread_experts, spreadable_experts
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import EXPERT_MESH, Ranks
from tests.mixtures import mixture

pytestmark = pytest.mark.slow


def test_what_cannot_be_spread_is_refused(model: Path, ranks: Ranks):
    with pytest.raises(ConfigError, match=r"expert_ranks=2 .*: 1 ranks"), joined(expert_ranks=2):
        pass
    alone = replace(ranks, expert_mesh=init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=EXPERT_MESH))
    dense = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match="expert_ranks=1: a Qwen3ForCausalLM has no stacked experts"):
        spread_experts(dense, alone, torch.float32)


def test_experts_that_an_older_transformers_does_not_mark_need_a_newer_one() -> None:
    model = mixture("qwen3_moe")
    marked = spreadable_experts(model, 1)
    for experts in marked:
        del experts._is_expert_parallel
    with pytest.raises(ConfigError, match=rf"=1: transformers {re.escape(transformers.__version__)}.* a newer version"):
        spreadable_experts(model, 1)
