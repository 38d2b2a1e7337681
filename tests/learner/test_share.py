from __future__ import annotations

import numpy as np
import torch

from asyncrl.learner.report import Phases, lag_counts, lag_values
from asyncrl.learner.share import build_episodes, build_share
from asyncrl.types import BatchPlan, Labels, Role, Turn
from tests.helpers import make_trajectory

CPU = torch.device("cpu")


def make_plan(groups: list[str]) -> BatchPlan:
    count = len(groups)
    return BatchPlan(3, 5, [f"t{i}" for i in range(count)], groups, [8] * count, [4] * count, [1.0] * count)


def labels_with(name: str, scores: list[float], **extra: float) -> Labels:
    ends = np.arange(1, len(scores) + 1, dtype=np.int32)
    return Labels(name, 0.5, 1.0, "test", np.asarray(scores, np.float32), ends, extra)


def test_episodes_follow_the_plan_and_step_scores_know_their_sequence():
    labels = [
        labels_with("t0", [0.1, 0.2], style=1.0, odd=3.0),
        labels_with("t1", []),
        labels_with("t2", [0.3], style=2),
    ]
    episodes = build_episodes(make_plan(["b", "a", "b"]), labels, CPU)
    assert episodes.group.tolist() == [0, 1, 0]
    assert episodes.step_sequence.tolist() == [0, 0, 2]
    assert episodes.step_end.tolist() == [1, 2, 1]
    assert episodes.lengths.tolist() == [4, 4, 4]
    assert episodes.version == 5


def test_a_greedy_sibling_is_the_first_member_of_its_group():
    labels = [labels_with(f"t{index}", []) for index in range(4)]
    plan = make_plan(["b", "b", "a", "a"])
    greedy = build_episodes(plan, labels, CPU, greedy_sibling=True).greedy
    assert greedy is not None
    assert greedy.tolist() == [True, False, True, False]
    assert build_episodes(plan, labels, CPU).greedy is None


def test_only_scores_that_every_trajectory_has_are_handed_on():
    labels = [labels_with("t0", [], style=1.0, odd=3.0), labels_with("t1", [], style=2.0)]
    assert {name: each.tolist() for name, each in build_episodes(make_plan(["a", "a"]), labels, CPU).extra.items()} == {
        "style": [1.0, 2.0]
    }


def test_a_share_packs_whole_sequences_and_finds_them_again():
    share = build_share([2, 5], [make_trajectory(length=6), make_trajectory(length=4)], CPU)
    assert share.tokens.sequence.tolist() == [2] * 6 + [5] * 4
    assert share.tokens.position.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert share.rows([5]).tolist() == [6, 7, 8, 9]
    packed = share.packed([5], share.rows([5]))
    assert packed.ids.tolist() == [0, 1, 2, 3]
    assert packed.lengths == [4]
    assert packed.wanted.tolist() == [False, False, True, True]


def test_every_branch_of_an_episode_is_packed_by_itself():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], np.bool_)
    bounds = (0, 1, Role.PROMPT), (1, 3, Role.ASSISTANT), (3, 5, Role.PROMPT), (5, 6, Role.ASSISTANT)
    ends = (6, 7, Role.PROMPT), (7, 8, Role.ASSISTANT)
    turns = tuple(Turn(*each) for each in (*bounds, *ends))
    versions = np.where(mask, 0, -1).astype(np.int32)
    logprobs = np.where(mask, -1, 0).astype(np.float32)
    several = make_trajectory(turns=turns, steps=(), loss_mask=mask, versions=versions, logprobs=logprobs)
    assert several.branches == [(0, 3), (3, 6), (6, 8)]
    share = build_share([0, 4], [make_trajectory(length=4), several], CPU)
    assert share.tokens.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    packed = share.packed([0, 4], share.rows([0, 4]))
    assert packed.lengths == [4, 3, 3, 2]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]


def test_a_rank_without_sequences_packs_a_dummy_that_belongs_to_nobody():
    share = build_share([], [], CPU)
    rows = share.rows([])
    assert len(rows) == 0
    assert share.packed([], rows).lengths == [2]


def test_the_lag_of_a_trajectory_is_that_of_its_oldest_token():
    versions = np.array([-1, -1, -1, -1, 3, 4, 5, 5], np.int32)
    trajectories = [make_trajectory(versions=versions), make_trajectory(version=5), make_trajectory(version=1)]
    counts = lag_counts(build_share([0, 1, 2], trajectories, CPU).tokens, version=5, max_lag=2)
    assert counts.tolist() == [1, 0, 1, 1]
    assert lag_values(counts) == {"lag/mean": 5 / 3, "lag/max": 3.0, "lag/histogram": [1.0, 0.0, 1.0, 1.0]}
    assert lag_counts(build_share([], [], CPU).tokens, version=5, max_lag=2).tolist() == [0, 0, 0, 0]


def test_idle_is_the_share_of_a_step_spent_waiting_for_others():
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    for name, seconds in (("wait", 1.0), ("fetch", 0.5), ("train", 4.5)):
        with phases(name):
            now[0] += seconds
    assert phases.values(tokens=60) == {
        "seconds/wait": 1.0,
        "seconds/fetch": 0.5,
        "seconds/train": 4.5,
        "seconds/step": 6.0,
        "idle": 0.25,
        "tokens_per_s": 10.0,
    }
