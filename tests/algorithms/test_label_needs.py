"""The labels that an algorithm needs. Labels that meet these needs never make a step raise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import registry
from asyncrl.types import LARGEST_FLOAT32, LabelNeeds, Labels
from tests.algorithms.support import alone, make_algorithm, random_batch, totals_of

NAMED = {"format": 1.0, "style": 0.5}


@pytest.mark.parametrize(
    ("changes", "scores", "unit_steps"),
    [
        ({}, (), False),
        ({"advantage": ("gdpo", {"weights": {**NAMED, "outcome": 1.0, "reward": 2.0}})}, ("format", "style"), False),
        ({"reward": ["best_of_n"]}, ("process",), False),
        ({"stream": [("ce", {"score": "style"}), ("ref_kl", {"score": "outcome"})]}, ("style",), False),
        ({"correction": ["zero_variance"]}, (), False),
        ({"correction": [("zero_variance", {"score": "accuracy"})]}, ("accuracy",), False),
        ({"advantage": "tests.algorithms.bad_parts.Asks"}, ("style",), False),
        ({"advantage": "pure", "reward": [("best_of_n", {"score": "format"})]}, ("format",), True),
    ],
)
def test_an_algorithm_says_which_scores_its_parts_read(changes, scores, unit_steps):
    assert make_algorithm(**changes).parts.label_needs == LabelNeeds(scores, unit_steps)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (LabelNeeds(), ""),
        (LabelNeeds(("rule/f",)), ""),
        (LabelNeeds(("rule/f", "rule/g")), "reads the scores ['rule/g'], but the labels have ['rule/f']"),
        (LabelNeeds(unit_steps=True), "step scores reach 1.5, but the algorithm needs step scores in [-1, 1]"),
    ],
)
def test_labels_meet_the_needs_or_the_reason_says_what_they_lack(needs, reason):
    steps = {"step_scores": np.array([0.5, -1.5], np.float32), "step_ends": np.array([1, 2], np.int32)}
    unmet = needs.unmet(Labels("t", 1.0, 1.0, "test", **steps, extra={"rule/f": 0.0}))
    assert reason in unmet
    assert bool(unmet) == bool(reason)


def _params(name):
    return {"gdpo": {"weights": NAMED}}.get(name, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.parts("advantage"))
@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=8, deadline=None)
def test_no_labels_that_meet_the_needs_make_a_step_raise(name, seed, data):
    """Rewards, outcomes and scores as large as labels may have them, all equal, and steps without scores, or none."""
    algorithm = make_algorithm(
        advantage=(name, _params(name)),
        loss="gpg",
        reward=[("best_of_n", {"score": "style"}), ("overlong", {"max_length": 4})],
        correction=[("zero_variance", {"score": "format"})],
        stream=[("ce", {"score": "style"})],
        greedy_sibling=name == "remax",
    )
    episodes, tokens = random_batch(seed)
    limit = 1.0 if algorithm.parts.label_needs.unit_steps else LARGEST_FLOAT32
    count, steps = episodes.count, episodes.step_scores.numel()

    def drawn(size: int, largest: float) -> torch.Tensor:
        extremes = st.sampled_from([0.0, 1.0, -1.0, largest, -largest])
        return torch.tensor(data.draw(st.lists(extremes, min_size=size, max_size=size)), dtype=torch.float32)

    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps)), dtype=torch.bool)
    episodes = replace(
        episodes,
        reward=drawn(count, LARGEST_FLOAT32),
        outcome=drawn(count, LARGEST_FLOAT32),
        step_scores=drawn(steps, limit)[keep],
        step_sequence=episodes.step_sequence[keep],
        step_end=episodes.step_end[keep],
        extra={"format": drawn(count, LARGEST_FLOAT32), "style": drawn(count, LARGEST_FLOAT32)},
    )
    prepared = algorithm.prepare(episodes, tokens, alone)
    loss, sums = algorithm.loss(tokens.behaviour.clone().requires_grad_(), prepared, totals_of(tokens, episodes))
    assert loss.dim() == 0
    assert algorithm.summary(sums, episodes)["noop"] in (0.0, 1.0)
