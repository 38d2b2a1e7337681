from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.errors import InvariantError
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.learner.step_metrics import Phases, lag_counts, lag_values, use_of_rank, use_values
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Role, Turn
from tests.helpers import FakeSpans, make_trajectory

CPU = torch.device("cpu")


def make_plan(groups: list[str]) -> BatchPlan:
    count = len(groups)
    return BatchPlan(3, 5, [f"t{i}" for i in range(count)], groups, [8] * count, [4] * count, [1.0] * count)


def labels_with(name: str, scores: list[float], **extra: float) -> Labels:
    ends = np.arange(1, len(scores) + 1, dtype=np.int32)
    return Labels(name, 0.5, 1.0, "test", np.asarray(scores, np.float32), ends, extra)


def test_episodes_follow_the_plan_and_have_the_scores_that_the_algorithm_reads():
    labels = [
        labels_with("t0", [0.1, 0.2], style=1.0, odd=3.0),
        labels_with("t1", [], style=2.0),
        labels_with("t2", [0.3], style=3.0),
    ]
    plan = make_plan(["b", "a", "b"])
    assert build_episodes(plan, labels, CPU).extra == {}
    episodes = build_episodes(plan, labels, CPU, needs=LabelNeeds(("style",)))
    assert episodes.group.tolist() == [0, 1, 0]
    assert episodes.step_sequence.tolist() == [0, 0, 2]
    assert episodes.step_end.tolist() == [1, 2, 1]
    assert episodes.lengths.tolist() == [4, 4, 4]
    assert episodes.version == 5
    assert {name: each.tolist() for name, each in episodes.extra.items()} == {"style": [1.0, 2.0, 3.0]}
    assert episodes.greedy is None
    with pytest.raises(InvariantError, match=r"^t1: the algorithm reads the scores \['odd'\], but the labels have"):
        build_episodes(plan, labels, CPU, needs=LabelNeeds(("odd", "style")))


def test_a_greedy_sibling_is_the_first_member_of_its_group():
    labels = [labels_with(f"t{index}", []) for index in range(4)]
    greedy = build_episodes(make_plan(["b", "b", "a", "a"]), labels, CPU, greedy_sibling=True).greedy
    assert greedy is not None
    assert greedy.tolist() == [True, False, True, False]


def test_a_local_batch_packs_whole_sequences_and_finds_them_again():
    batch = build_local_batch([2, 5], [make_trajectory(length=6), make_trajectory(length=4)], CPU)
    assert batch.tokens.sequence.tolist() == [2] * 6 + [5] * 4
    assert batch.tokens.position.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert batch.rows([5]).tolist() == [6, 7, 8, 9]
    packed = batch.forward_pass([5]).packed
    assert packed.ids.tolist() == [0, 1, 2, 3]
    assert packed.layout.bounds[0].tolist() == [0, 4]
    assert packed.needed.tolist() == [2, 3]


def test_every_branch_of_an_episode_is_packed_by_itself():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], np.bool_)
    bounds = (0, 1, Role.PROMPT), (1, 3, Role.ASSISTANT), (3, 5, Role.PROMPT), (5, 6, Role.ASSISTANT)
    ends = (6, 7, Role.PROMPT), (7, 8, Role.ASSISTANT)
    turns = tuple(Turn(*each) for each in (*bounds, *ends))
    versions = np.where(mask, 0, -1).astype(np.int32)
    logprobs = np.where(mask, -1, 0).astype(np.float32)
    several = make_trajectory(turns=turns, steps=(), versions=versions, logprobs=logprobs)
    assert several.branches == [(0, 3), (3, 6), (6, 8)]
    batch = build_local_batch([0, 4], [make_trajectory(length=4), several], CPU)
    assert batch.tokens.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    packed = batch.forward_pass([0, 4]).packed
    assert packed.layout.bounds[0].tolist() == [0, 4, 7, 10, 12]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]


def test_tokens_are_restricted_where_a_grammar_left_less_than_the_least_mass():
    turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", (), "regex"))
    mass = np.array([1, 1, 1, 1, 0, 0.5, 0.95, 1], np.float32)
    under = make_trajectory(turns=turns, grammar_mass=mass)
    restricted = build_local_batch([0, 1], [make_trajectory(length=4), under], CPU, None, 0.95).tokens.restricted
    assert restricted is not None
    assert restricted.nonzero()[:, 0].tolist() == [8, 9]
    assert build_local_batch([0], [make_trajectory()], CPU, None, 0.95).tokens.restricted is None
    assert build_local_batch([0], [under], CPU, None, 1e-9).tokens.restricted is not None


def test_a_rank_without_sequences_packs_a_dummy():
    batch = build_local_batch([], [], CPU)
    rows = batch.rows([])
    assert len(rows) == 0
    assert batch.forward_pass([]).packed.layout.bounds[0].tolist() == [0, 2]


def test_the_lag_of_a_trajectory_is_that_of_its_oldest_token():
    versions = np.array([-1, -1, -1, -1, 3, 4, 5, 5], np.int32)
    trajectories = [make_trajectory(versions=versions), make_trajectory(version=5), make_trajectory(version=1)]
    counts = lag_counts(build_local_batch([0, 1, 2], trajectories, CPU).tokens, version=5, max_lag=2)
    assert counts.tolist() == [1, 0, 1, 1]
    assert lag_values(counts) == {"lag/mean": 5 / 3, "lag/max": 3, "lag/0": 1, "lag/1": 0, "lag/2": 1, "lag/3": 1}
    assert lag_counts(build_local_batch([], [], CPU).tokens, version=5, max_lag=2).tolist() == [0, 0, 0, 0]


def test_idle_is_the_share_of_a_step_spent_waiting_for_others():
    now = [0.0]
    begun: list[str] = []
    spans = FakeSpans(lambda: now[0])
    phases = Phases(begun.append, lambda: now[0], spans, step=3)
    for name, seconds in (("wait", 1.0), ("fetch", 0.5), ("train", 4.5)):
        with phases(name):
            now[0] += seconds
    by_phase = {"seconds/wait": 1.0, "seconds/fetch": 0.5, "seconds/train": 4.5, "seconds/step": 6.0}
    assert phases.values(tokens=60) == {**by_phase, "idle": 0.25, "tokens_per_s": 10.0}
    phases.finish(version=2)
    recorded = [(name, values["step"], values["seconds"]) for name, values, _ in spans.spans]
    assert recorded == [("wait", 3, 1.0), ("fetch", 3, 0.5), ("train", 3, 4.5), ("step", 3, 6.0)]


def test_utilisation_counts_three_forward_passes_of_all_ranks():
    use = use_of_rank(5.0, CPU, 0, 2) + use_of_rank(15.0, CPU, 1, 2)
    seconds = {"seconds/train": 2.0, "seconds/step": 3.0}
    values = use_values(use, seconds, peak=20.0)
    assert values == {"memory/peak_gb": values["memory/peak_gb"], "mfu/train": 0.75, "mfu/step": 0.5}
    assert use_values(use, seconds, peak=None).keys() == {"memory/peak_gb"}


def test_the_weights_of_a_plan_are_those_of_its_episodes_though_the_largest_is_one():
    labels = [labels_with(f"t{index}", []) for index in range(3)]
    plan = make_plan(["a", "b", "c"])
    assert build_episodes(plan, labels, CPU).priority is None
    priority = build_episodes(replace(plan, weights=[1.0, 0.5, 0.25]), labels, CPU).priority
    assert priority is not None
    assert priority.tolist() == [1.0, 0.5, 0.25]
