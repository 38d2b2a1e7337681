from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import ModelConfig, ObserveConfig, PartConfig
from asyncrl.dashboard.episode_list import EpisodeQuery
from asyncrl.errors import RefusedError
from asyncrl.learner.batch.from_config import keep_settings
from asyncrl.learner.batch.keeping import BYTES_A_TOKEN, EpisodeKeeper, KeptChoice, Sample, choose, open_keeper
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.observe.kept.episode import HELD_OUT
from asyncrl.observe.kept.format import EVALUATED_FOLDER
from asyncrl.observe.kept.recording import KeptRecorder
from asyncrl.observe.kept.writing import KeptWriter, remove_kept
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import BatchPlan, Labels, Task, Trajectory
from tests.helpers import FakeMetrics, make_labels, make_task, make_trajectory
from tests.learner.support import Run, assert_weights_equal, make_config
from tests.observe.kept.examples import example_step

ROOM = 1 << 30


def plan_of(groups: int, size: int, step: int = 0, tokens: int = 10) -> BatchPlan:
    count = groups * size
    return BatchPlan(
        step=step,
        version=step,
        ids=[f"{index}" for index in range(count)],
        group_ids=[f"g{index // size}" for index in range(count)],
        tokens=[tokens] * count,
        sampled=[tokens // 2] * count,
        weights=[1.0] * count,
    )


def test_the_groups_of_the_best_and_the_worst_episode_are_kept_whole_and_then_random_ones() -> None:
    rewards = [0.5] * 40
    rewards[13], rewards[26] = 0.9, 0.1
    plan = plan_of(10, 4)
    assert choose(plan, rewards, 1, ROOM, 0).members == [12, 13, 14, 15]
    assert choose(plan, rewards, 2, ROOM, 0).members == [12, 13, 14, 15, 24, 25, 26, 27]
    choice = choose(plan, rewards, 4, ROOM, 0)
    assert choice == choose(plan, rewards, 4, ROOM, 0)
    assert len(choice.members) == len(set(choice.members)) == 16
    assert Counter(tuple(flags) for flags in choice.why.values()) == {
        ("best",): 1,
        ("worst",): 1,
        (): 6,
        ("random",): 8,
    }
    assert choice.why[13] == ["best"]
    assert choose(plan, rewards, 100, ROOM, 0).members != list(range(40))
    assert sorted(choose(plan, rewards, 100, ROOM, 0).members) == list(range(40))


def test_random_groups_differ_by_step_and_seed_and_so_does_the_best_of_equals() -> None:
    rewards = [0.0, 1.0] * 20
    chosen = {
        tuple(choose(plan_of(10, 4, step), rewards, 3, ROOM, seed).members) for step in range(10) for seed in (1, 2)
    }
    assert len(chosen) > 15
    firsts = {choose(plan_of(10, 4, step), rewards, 3, ROOM, 0).members[0] for step in range(30)}
    assert len(firsts) > 4


def test_the_row_of_a_kept_episode_has_its_masked_tokens_and_the_lag_of_the_others() -> None:
    episodes = example_step(2, members=2, groups=1).episodes
    trajectory = episodes[1].trajectory
    sampled, old = trajectory.sampled_tokens, int((trajectory.versions == 1).sum())
    assert 0 < old < sampled
    for masked, lag in ((0, 1), (old - 1, 1), (old, 0), (sampled - 1, 0), (sampled, -1)):
        all_sampled = [episodes[0].row.sampled, sampled]
        plan = replace(plan_of(1, 2, 2), sampled=all_sampled)
        if masked:
            plan = replace(plan, first_trained=[1, 2], trained=[all_sampled[0], sampled - masked])
        choice = KeptChoice([0, 1], {0: [], 1: []})
        sample = Sample(plan, choice, [each.trajectory for each in episodes], [each.labels for each in episodes])
        numbers = np.zeros((3, sum(len(each.trajectory) for each in episodes)), np.float32)
        rows = [each.row for each in sample.with_numbers(numbers).episodes]
        assert [(row.masked, row.lag) for row in rows] == [(0, 0), (masked, lag)]


def test_a_group_that_is_too_large_is_left_out_and_counted() -> None:
    plan = plan_of(2, 2)
    plan.tokens[1] = 100_000  # type: ignore[index]
    choice = choose(plan, [9.0, 9.0, 1.0, 2.0], 1, 2 * BYTES_A_TOKEN * 50_000, 0)
    assert (choice.members, choice.left_out) == ([2, 3], 1)
    assert choose(plan, [9.0, 9.0, 1.0, 2.0], 1, 100, 0).left_out == 2
    assert choose(plan, [0.0] * 4, 0, ROOM, 0).members == ()


@pytest.mark.slow
@pytest.mark.parametrize("proximal", ["auto", "recompute"])
def test_a_step_keeps_what_it_trained_and_trains_the_same_bits_as_without(
    model: Path, ranks: Ranks, tmp_path: Path, proximal: str
) -> None:
    runs = {}
    for groups in (0, 1, 3):
        config = make_config(model, tmp_path / str(groups), steps=3, minibatches=1, batch_size=12, micro_tokens=40)
        config.observe.keep_episodes = groups
        config.algorithm.correction = [PartConfig("mask", {"low": 0.5, "high": 2.0})]
        config.algorithm.proximal = proximal
        runs[groups] = Run(config).train(ranks)
    for groups in (1, 3):
        for version, weights in runs[0].weights.items():
            assert_weights_equal(weights, runs[groups].weights[version])
        assert runs[0].metrics.of("loss") == runs[groups].metrics.of("loss")
    assert runs[3].metrics.of("kept/lost") == dict.fromkeys(range(3), 0)
    assert KeptEpisodes(tmp_path / "0" / "run").rows() == ()
    kept = KeptEpisodes(tmp_path / "3" / "run")
    assert Counter(row.step for row in kept.rows()) == {0: 12, 1: 12, 2: 12}
    assert Counter(row.step for row in KeptEpisodes(tmp_path / "1" / "run").rows()) == {0: 4, 1: 4, 2: 4}
    replay, dropped = runs[3].replay, 0
    for row in kept.rows():
        each = kept.read(row.step, row.id)
        trajectory, mask = each.trajectory, each.trajectory.loss_mask
        lag = row.step - trajectory.oldest_version
        assert (row.reward, row.version, row.lag) == (each.labels.reward, row.step, lag)
        task = replay.core.task(row.id)
        assert each.task is not None
        assert (each.task.id, each.task.ground_truth, each.task.data_source) == (task.id, task.ground_truth, row.source)
        for array in (each.advantages, each.importance_weights, each.proximal_logprobs):
            assert not array[~mask].any()
        assert len(set(each.advantages[mask].tolist())) == 1
        assert (each.proximal_logprobs[mask] < 0).all()
        ratio = np.exp(each.proximal_logprobs - trajectory.logprobs)[mask]
        expected = np.where((ratio >= 0.5) & (ratio <= 2), ratio, 0)
        np.testing.assert_allclose(each.importance_weights[mask], expected, rtol=1e-4)
        dropped += int((expected == 0).sum())
    assert dropped


@pytest.mark.slow
def test_steps_that_are_trained_again_replace_what_was_kept_of_them(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, steps=5)
    Run(config, die_at=3).until_stopped(ranks)
    kept = KeptEpisodes(tmp_path / "run")
    assert {row.step for row in kept.rows()} == {0, 1, 2}
    before = {row.id: kept.read(row.step, row.id).advantages for row in kept.rows()}
    Run(config).train(ranks)
    assert Counter(row.step for row in kept.rows()) == dict.fromkeys(range(5), 8)
    for name, advantages in before.items():
        found = kept.find(name)
        assert found is not None
        np.testing.assert_array_equal(kept.read(found.step, name).advantages, advantages)


@pytest.mark.slow
def test_a_full_disk_does_not_stop_the_run_and_is_counted(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(KeptWriter, "add", full)
    run = Run(make_config(model, tmp_path, steps=3)).train(ranks)
    # The thread counts a little later than the step ends.
    assert run.metrics.of("kept/lost")[2] >= 1
    assert run.metrics.of("kept/episodes")[2] == 0


@pytest.mark.slow
def test_numbers_that_cannot_be_worked_out_lose_the_sample_and_not_the_run(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("asyncrl.learner.batch.keeping._own_numbers", fails)
    run = Run(make_config(model, tmp_path, steps=2)).train(ranks)
    assert run.metrics.of("kept/lost") == {0: 1, 1: 2}
    assert KeptEpisodes(tmp_path / "run").rows() == ()


@pytest.mark.slow
@pytest.mark.parametrize("upload", [[], ["episodes"]])
def test_sinks_get_the_text_of_the_sample_only_where_that_was_asked_for(
    model: Path, ranks: Ranks, tmp_path: Path, upload: list[str]
) -> None:
    config = make_config(model, tmp_path, steps=2)
    config.observe.upload = upload
    run = Run(config).train(ranks)
    assert [(step, len(shown)) for step, shown in run.metrics.shown] == ([(0, 8), (1, 8)] if upload else [])
    for row in KeptEpisodes(tmp_path / "run").rows() if upload else ():
        (shown,) = (each for each in run.metrics.shown[row.step][1] if each.facts["id"] == row.id)
        assert shown.facts["reward"] == row.reward
        assert len(shown.messages) == 4


class Evaluated:
    """A replay that has these held-out episodes."""

    def __init__(self, *trajectories: Trajectory) -> None:
        self._by_id = {each.id: each for each in trajectories}

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        if gone := set(ids) - self._by_id.keys():
            raise RefusedError(f"{gone} are gone")
        return [self._by_id[each] for each in ids]

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        return [make_labels(each) for each in ids]

    def task(self, name: str) -> Task | None:
        return make_task(100)


@pytest.mark.slow
@pytest.mark.parametrize("upload", [[], ["episodes"]])
def test_sinks_get_the_text_of_held_out_episodes_in_a_table_of_their_own(
    model: Path, ranks: Ranks, tmp_path: Path, upload: list[str]
) -> None:
    episode, metrics = make_trajectory(id="e2-000000.0.0", group_id="e2-000000", version=2), FakeMetrics()
    settings = keep_settings(ObserveConfig(upload=upload), seed=0)
    keeper = open_keeper(settings, tmp_path, ModelConfig(str(model)), ranks, metrics)
    keeper.keep_evaluated(4, 2, [episode.id], Evaluated(episode))  # type: ignore[arg-type]
    keeper.close()
    assert metrics.shown == []
    shown = [(step, [each.facts["id"] for each in episodes]) for step, episodes in metrics.shown_held_out]
    assert shown == ([(4, [episode.id])] if upload else [])


def test_held_out_episodes_are_kept_apart_from_trained_ones_and_marked(ranks: Ranks, tmp_path: Path) -> None:
    KeptWriter(tmp_path, ROOM).add(example_step(4))
    episodes = [make_trajectory(id=f"e2-{row:06d}.0.0", group_id=f"e2-{row:06d}", version=2) for row in range(2)]
    recorder = KeptRecorder(tmp_path, ROOM, folder=EVALUATED_FOLDER)
    keeper = EpisodeKeeper(keep_settings(ObserveConfig(), seed=0), ranks, None, recorder)
    keeper.keep_evaluated(4, 2, [each.id for each in episodes], Evaluated(*episodes))  # type: ignore[arg-type]
    keeper.keep_evaluated(6, 3, ["e3-000000.0.0"], Evaluated())  # type: ignore[arg-type]
    keeper.close()
    assert (keeper.values()["kept/episodes_evaluated"], keeper.values()["kept/lost_evaluated"]) == (2, 1)
    kept = KeptEpisodes(tmp_path)
    assert [HELD_OUT in row.flags for row in kept.rows()] == [False] * 12 + [True] * 2
    assert [each.id for each in EpisodeQuery.of({"flag": HELD_OUT}).select(kept.rows())] == [
        each.id for each in episodes
    ]
    found = kept.read(4, episodes[1].id)
    assert found.task is not None
    assert (found.row.step, found.row.version, found.task.id) == (4, 2, make_task(100).id)
    assert np.array_equal(found.trajectory.tokens, episodes[1].tokens)
    assert not any(array.any() for array in (found.advantages, found.importance_weights, found.proximal_logprobs))
    assert len(kept.step(4)) == 12
    remove_kept(tmp_path, lambda step: step == 4, EVALUATED_FOLDER)
    assert [HELD_OUT in row.flags for row in kept.rows()] == [False] * 12
