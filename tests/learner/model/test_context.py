"""Ranks that divide the tokens of a pass give what one rank gives."""

from __future__ import annotations

import sys
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.ranks.launcher import Meeting, Membership, run_ranks
from asyncrl.learner.ranks.ranks import Ranks, joined
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.packed_layout import PackedLayout
from tests.learner.as_one_rank import assert_same_pass, assert_same_runs
from tests.learner.context_ranks import (
    ARRANGEMENTS,
    FAMILIES,
    LENGTHS,
    MIXTURE,
    configs,
    outputs,
    trained,
    write_family,
)
from tests.learner.support import VOCABULARY, Run
from tests.mixtures import save_mixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all families, and a mixture for runs."""
    folder = tmp_path_factory.mktemp("context")
    for family in FAMILIES:
        write_family(family, folder)
    build_tokenizer().save_pretrained(save_mixture(folder / MIXTURE, "qwen3_moe", vocab_size=VOCABULARY))
    return folder


def done_by(count: int, folder: Path, model: Path) -> dict[Any, Any]:
    """What so many ranks did."""
    if 0 < torch.cuda.device_count() < count:
        pytest.skip(f"{count} ranks need as many GPUs, or a machine without any")
    with chdir(Path(__file__).parents[3]):
        command = [sys.executable, "-m", "tests.learner.context_ranks", str(folder), str(model)]
        run_ranks(command, count, threading.Event())
    return torch.load(folder / f"{count}.pt", weights_only=False)


@pytest.fixture(scope="module")
def two(folder: Path, model: Path) -> dict[Any, Any]:
    return done_by(2, folder, model)


@pytest.fixture(scope="module")
def four(folder: Path, model: Path) -> dict[Any, Any]:
    return done_by(4, folder, model)


@pytest.fixture(scope="module")
def one(model: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    return trained(model, folder / "one", ranks)


by_two_and_four = pytest.mark.parametrize(
    "ranked", [pytest.param("two", marks=pytest.mark.slow), pytest.param("four", marks=pytest.mark.long)]
)


@by_two_and_four
def test_a_divided_pass_gives_the_log_probs_values_and_gradients_of_a_whole_one(
    ranked: str, folder: Path, ranks: Ranks, request: pytest.FixtureRequest
):
    done = request.getfixturevalue(ranked)
    tried = [key for key in done if len(key) == 3]
    assert len(tried) == sum(len(families) for *_, families in ARRANGEMENTS[2 if ranked == "two" else 4])
    for key in tried:
        found, expected = done[key], outputs(folder / key[2], ranks, 1.0)
        torch.testing.assert_close(found["canary"], expected["canary"], atol=2e-5, rtol=0)
        for name in LENGTHS:
            assert_same_pass(found[name], expected[name], f"{key} {name}")


@by_two_and_four
def test_ranks_that_divide_passes_train_measure_and_publish_what_one_does(
    ranked: str, one: dict[str, Any], request: pytest.FixtureRequest
):
    done = request.getfixturevalue(ranked)
    for found in [done[key] for key in done if len(key) == 2]:
        assert_same_runs(found, one)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_that_divide_passes_resumes_on_one(
    model: Path, folder: Path, ranks: Ranks, two: dict[Any, Any]
):
    whole = two[2, 1]["critic"]["weights"]
    config = configs(model, folder / "2 ranks, (2, 1)")["critic"]
    steps = config.learner.steps
    resumed = Run(replace(config, learner=replace(config.learner, steps=steps + 1))).train(ranks)
    assert list(resumed.weights) == [steps, steps + 1]
    assert all(torch.equal(tensor, resumed.weights[steps][name]) for name, tensor in whole[steps].items())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.booleans())
def test_the_parts_of_a_pass_are_its_tokens_and_each_query_keeps_its_keys(lengths: list[int], size: int, alike: bool):
    sequences = [torch.arange(length) if alike else torch.arange(length) + 10 * n for n, length in enumerate(lengths)]
    whole = PackedSequences.of(sequences, EVERY if alike else None)
    parts = [whole.divided(ContextGroup("", size, rank)) for rank in range(size)]
    ids = torch.cat([part.computed[0] for part in parts])
    assert ids[: len(whole.ids)].equal(whole.ids)
    assert len(ids) - len(whole.ids) < size
    expected, seen = keys_of(whole.layout), {}
    for rank, each in enumerate(parts):
        assert each.part is not None
        assert each.layout.own is not None
        assert len(each.computed[0]) == len(ids) // size
        seen |= {rank * len(ids) // size + row: keys for row, keys in keys_of(each.layout.own).items()}
        assert each.targets.equal(whole.targets[each.part.needed])
        assert each.computed[0][each.sources].equal(whole.ids[whole.sources][each.part.needed])
    assert {row: seen[row] for row in expected} == expected
    order = torch.cat([each.part.needed for each in parts if each.part is not None])
    assert sorted(order.tolist()) == list(range(len(whole.needed)))


def keys_of(layout: PackedLayout) -> dict[int, list[int]]:
    """The tokens that each query sees."""
    every = torch.arange(int(layout.bounds[1, -1])) if layout.paths is None else layout.paths
    (starts, firsts), (stops, lasts) = layout.bounds[:, :-1].tolist(), layout.bounds[:, 1:].tolist()
    return {
        row: every[first : last - (stop - row) + 1].tolist()
        for start, stop, first, last in zip(starts, stops, firsts, lasts, strict=True)
        for row in range(start, stop)
    }


def test_groups_that_the_ranks_of_a_copy_cannot_be_dealt_out_to_are_refused():
    with (
        pytest.raises(ConfigError, match=r"learner\.context_ranks=2 learner\.replicas=2: 6 ranks .* no multiple of 4"),
        joined(2, member=Membership(0, 0, Meeting(0, 6, "nowhere")), context_ranks=2),
    ):
        pass
