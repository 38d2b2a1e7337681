"""A noun that exists is valid: what breaks an invariant cannot be constructed."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.errors import InvariantError
from asyncrl.types import BatchPlan, Finish, Labels, Role, Sampling, Step, Task, Trajectory, Turn, dtype_of, runs_of
from tests.helpers import make_demonstration, make_task, make_trajectory


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Task", {each.name for each in fields(Task)}),
        ("Trajectory", {*Trajectory.__struct_fields__, "versions", "loss_mask"}),
    ],
)
def test_the_page_of_the_terms_explains_every_field(name: str, expected: set[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
    table = page.partition(f"| field of a {name} |")[2].partition("\n\n")[0]
    explained = {word for row in re.findall(r"^\| (.*?) \|", table, re.M) for word in re.findall(r"`(\w+)`", row)}
    assert explained == expected


def logprobs(*changes: tuple[int, float]) -> np.ndarray:
    values = make_trajectory().logprobs.copy()
    for index, value in changes:
        values[index] = value
    return values


def under_grammar(mass: np.ndarray) -> dict[str, Any]:
    """Changes that make an answer one under a grammar."""
    turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", (), "regex"))
    return {"turns": turns, "grammar_mass": mass.astype(np.float32)}


def images(*spans: tuple[int, int]) -> dict[str, Any]:
    """Changes that let images stand in these tokens."""
    return {"image_spans": runs(*spans), "image_digests": np.zeros((len(spans), 32), np.uint8)}


def runs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": logprobs((7, -0.5))}, "not sampled has a log-prob"),
        ({"version_runs": runs((0, -1))}, "teaches no token"),
        ({"version_runs": runs((0, -1), (4, 0))}, "tokens of a policy version"),
        ({"version_runs": runs((0, -1), (4, -2), (6, 3))}, "tokens of a policy version"),
        ({"version_runs": runs((0, -1), (4, -3))}, "tokens of a policy version"),
        ({"finish": Finish.COMPLETED}, "versions are less than -1"),
    ],
)
def test_a_demonstration_has_no_version_and_no_log_prob(changes: dict[str, Any], reason: str) -> None:
    whole = make_demonstration()
    assert whole.loss_mask.tolist() == [False] * 4 + [True] * 4
    assert (whole.is_demonstration, whole.sampled_tokens, whole.oldest_version) == (True, 4, -2)
    with pytest.raises(InvariantError, match=reason):
        make_demonstration(**{"logprobs": np.zeros(8, np.float32), **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": logprobs((7, np.nan))}, "no valid log-prob"),
        ({"logprobs": logprobs((5, -np.inf))}, "no valid log-prob"),
        ({"logprobs": logprobs((4, np.inf))}, "no valid log-prob"),
        ({"logprobs": logprobs((4, 0.5))}, "at most 0"),
        ({"logprobs": logprobs((0, -0.5))}, "not sampled has a log-prob"),
        ({"logprobs": logprobs((0, np.nan))}, "not sampled has a log-prob"),
        ({"tokens": np.full(8, -1, np.int32)}, "token id is negative"),
        ({"tokens": np.arange(8)}, "int64"),
        ({"tokens": np.array(3, np.int32)}, r"tokens is int32\[\]"),
        ({"tokens": np.zeros((1, 8), np.int32)}, r"tokens is int32\[1, 8\]"),
        ({"logprobs": np.array(-0.5, np.float32)}, r"logprobs is float32\[\]"),
        ({"version_runs": np.array(0, np.int32)}, "version_runs is"),
        ({"tokens": np.arange(9, dtype=np.int32)}, r"logprobs is float32\[8\]"),
        ({"version_runs": runs((0, -1))}, "no token was sampled"),
        ({"version_runs": runs((0, -1), (4, -2))}, "less than -1"),
        ({"version_runs": runs()}, "do not cover"),
        ({"version_runs": runs((1, 3))}, "do not cover"),
        ({"version_runs": runs((0, -1), (8, 3))}, "do not cover"),
        ({"version_runs": runs((0, -1), (4, 3), (4, 2))}, "do not cover"),
        ({"version_runs": np.zeros((2, 3), np.int32)}, "version_runs is"),
        ({"version_runs": runs((0, -1), (5, 3)), "logprobs": logprobs((4, 0))}, "assistant's turn .* not all sampled"),
        ({"steps": (Step(3, 8),)}, "has tokens that were not sampled"),
        ({"steps": (Step(5, 5),)}, "is empty"),
        (under_grammar(np.ones(7)), r"grammar_mass is float32\[7\]; it must be float32\[8\]"),
        (under_grammar(np.ones(0)), r"grammar_mass is float32\[0\]; it must be float32\[8\]"),
        ({"grammar_mass": np.ones(8, np.float32)}, r"grammar_mass is float32\[8\]; it must be float32\[0\]"),
        *((under_grammar(np.full(8, value)), "mass is not from 0 to 1") for value in (-0.1, 1.1, float("nan"))),
        (under_grammar(np.full(8, 0.5)), "not 1 where nothing was sampled"),
        ({"rewards": {"tool": float("nan")}}, "not finite"),
        ({"timings": {"tool": float("inf")}}, "not finite"),
        ({"turns": (Turn(0, 8, Role.TOOL, score=1.0),)}, "the tool's turn .* has the score 1.0"),
        ({"turns": (Turn(4, 8, Role.ASSISTANT, score=float("nan")),)}, "has the score nan"),
        (images((1, 1)), "overlaps the one before"),
        (images((2, 3), (0, 1)), "overlaps the one before"),
        (images((7, 9)), "overlaps the one before or leaves the tokens"),
        (images((2, 5)), "has sampled tokens"),
        (images((4, 8)), "has sampled tokens"),
        (images((0, 2), (3, 4)) | {"image_digests": np.zeros((1, 32), np.uint8)}, r"image_digests is uint8\[1, 32\]"),
        ({"image_spans": np.array([[0, 1]], np.int32)}, "image_digests is"),
        ({"image_digests": np.zeros((1, 32), np.uint8)}, "image_digests is"),
        (
            images((1, 3)) | {"turns": (Turn(0, 2, Role.PROMPT), Turn(2, 4, Role.PROMPT))},
            "sampled tokens, or lies in two branches",
        ),
    ],
)
def test_a_trajectory_that_breaks_an_invariant_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvariantError, match=reason):
        make_trajectory(**changes)


@pytest.mark.parametrize("spans", [[(4, 6), (5, 8)], [(6, 8), (4, 6)], [(4, 9)], [(6, 5)], [(-4, 5)]])
def test_overlapping_or_unordered_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvariantError, match="overlaps"):
        make_trajectory(turns=tuple(Turn(start, end, Role.TOOL) for start, end in spans))
    with pytest.raises(InvariantError, match="overlaps"):
        make_trajectory(steps=tuple(Step(start, end) for start, end in spans))


def test_a_prompt_begins_a_branch_and_a_branch_begins_with_what_was_given() -> None:
    def turns(*bounds: int) -> tuple[Turn, ...]:
        return tuple(Turn(start, end, Role.PROMPT) for start, end in pairwise(bounds))

    assert make_trajectory(turns=()).branches == [(0, 8)]
    assert make_trajectory(turns=turns(0, 2, 4)).branches == [(0, 2), (2, 8)]
    for bad in (turns(5, 6), turns(2, 2, 3), turns(8, 8)):
        with pytest.raises(InvariantError, match="is empty, or begins with a sampled token"):
            make_trajectory(turns=bad)


@pytest.mark.slow
@given(st.lists(st.integers(-1, 3), min_size=2, max_size=40).filter(lambda versions: max(versions) >= 0))
def test_runs_say_the_versions_token_by_token(values: list[int]) -> None:
    versions = np.array([-1, *values], np.int32)
    mask = versions >= 0
    trajectory = make_trajectory(
        tokens=np.zeros(len(versions), np.int32),
        logprobs=np.where(mask, -1, 0).astype(np.float32),
        version_runs=runs_of(versions),
        turns=(),
        steps=(),
    )
    assert trajectory.versions.tolist() == versions.tolist()
    assert trajectory.loss_mask.tolist() == mask.tolist()
    assert trajectory.sampled_tokens == mask.sum()
    assert trajectory.oldest_version == versions[mask].min()
    assert trajectory.newest_version == versions.max()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"reward": float("nan")}, "not finite"),
        ({"step_scores": np.array([np.inf], np.float32), "step_ends": np.array([1], np.int32)}, "not finite"),
        ({"step_scores": np.ones(2, np.float32)}, "must be int32.2."),
        ({"step_scores": np.ones(2, np.float32), "step_ends": np.array([2, 2], np.int32)}, "increase"),
        ({"step_scores": np.array(0.5, np.float32)}, "must be float32.1."),
        ({"extra": {"bonus": 1e39}}, "not finite"),
    ],
)
def test_labels_that_are_not_finite_or_do_not_pair_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvariantError, match=reason):
        Labels(**{"trajectory_id": "t", "reward": 0.0, "outcome": 0.0, "scorer": "s", **values})


def test_a_plan_that_names_a_trajectory_twice_is_refused() -> None:
    with pytest.raises(InvariantError, match="twice"):
        BatchPlan(0, 0, ["a", "a"], ["g", "g"], [1, 1], [1, 1], [1.0, 1.0])


def test_impossible_sampling_and_tasks_are_refused() -> None:
    with pytest.raises(InvariantError, match="temperature"):
        Sampling(temperature=-1)
    with pytest.raises(InvariantError, match="no messages"):
        make_task(messages=[])


def test_the_annotation_of_an_array_names_its_dtype() -> None:
    assert dtype_of(NDArray[np.float32]) == np.float32
    assert dtype_of(list[int]) is None
    assert dtype_of(int) is None


def test_a_grammars_mass_stands_beside_each_token_where_a_turn_has_a_grammar_and_nowhere_else() -> None:
    mass = np.array([1, 1, 1, 1, 0, 0.25, 1, 1], np.float32)
    trajectory = make_trajectory(**under_grammar(mass))
    np.testing.assert_array_equal(trajectory.grammar_mass, mass)
    assert make_trajectory().grammar_mass.size == 0
