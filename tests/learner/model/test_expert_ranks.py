"""Experts that are spread over ranks train as they do on one rank, for each way to spread them."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.learner.model.expert_ranks import spread_experts, spreadable_experts
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import run_ranks
from asyncrl.learner.ranks.ranks import EXPERT_MESH, Ranks
from tests.learner.expert_ranks import train_all
from tests.learner.support import VOCABULARY, assert_weights_close, assert_weights_equal
from tests.mixtures import mixture, save_mixture

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixtures of three families: without biases, with them, and with routers that have a buffer."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3_moe", "gpt_oss", "glm4_moe"):
        build_tokenizer().save_pretrained(save_mixture(folder / family, family, vocab_size=VOCABULARY))
    return folder


@pytest.fixture(scope="module")
def one(models: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("one")
    return train_all(models, folder, STEPS, ranks), folder


def spread(models: Path, folder: Path, steps: int, ranks: int, *divided: int) -> dict[str, Any]:
    """The runs on so many ranks; `divided` are the replicas, and the ranks of a context and of experts."""
    if 0 < torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many GPUs, or a machine without any")
    with chdir(Path(__file__).parents[3]):
        given = (models, folder, steps, *divided)
        run_ranks([sys.executable, "-m", "tests.learner.expert_ranks", *map(str, given)], ranks, threading.Event())
    found: dict[str, Any] = torch.load(folder / "results.pt")
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for family, (weights, metrics) in found.items():
        assert weights.keys() == expected[family][0].keys()
        for version, tensors in weights.items():
            assert_weights_close(tensors, expected[family][0][version], atol=1e-5)
        for name, values in metrics.items():
            assert values == pytest.approx(expected[family][1][name], rel=1e-4, abs=1e-6), (family, name)


@pytest.fixture(scope="module")
def longer(models: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same runs on one rank with a step more."""
    return train_all(models, tmp_path_factory.mktemp("longer"), STEPS + 1, ranks)


def last(found: dict[str, Any]) -> dict[str, Any]:
    """The runs' last versions."""
    return {family: ({STEPS + 1: weights[STEPS + 1]}, {}) for family, (weights, _) in found.items()}


@pytest.mark.parametrize(
    "divided",
    [
        pytest.param((2, 1, 1, 2), id="2 ranks", marks=pytest.mark.heavy),
        pytest.param((4, 1, 1, 2), id="neighbours that gather", marks=pytest.mark.long),
        pytest.param((4, 2, 1, 2), id="copies", marks=pytest.mark.long),
        pytest.param((4, 1, 2, 4), id="with a divided context", marks=pytest.mark.long),
    ],
)
def test_spread_experts_train_as_on_one_rank_and_their_checkpoints_resume_there(
    divided: tuple[int, ...],
    models: Path,
    ranks: Ranks,
    one: tuple[dict[str, Any], Path],
    longer: dict[str, Any],
    tmp_path: Path,
):
    found = spread(models, tmp_path, STEPS, *divided)
    assert_same(found, one[0])
    resumed = train_all(models, tmp_path, STEPS + 1, ranks)
    for family, (weights, _) in resumed.items():
        assert list(weights) == [STEPS, STEPS + 1]
        assert_weights_equal(weights[STEPS], found[family][0][STEPS])
    assert_same(last(resumed), last(longer))


@pytest.mark.long
def test_checkpoints_of_one_rank_resume_with_spread_experts(
    models: Path, one: tuple[dict[str, Any], Path], longer: dict[str, Any], tmp_path: Path
):
    shutil.copytree(one[1], tmp_path / "copy")
    assert_same(last(spread(models, tmp_path / "copy", STEPS + 1, 2, 1, 1, 2)), last(longer))


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
