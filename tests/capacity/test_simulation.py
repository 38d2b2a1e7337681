"""The simulation against what can be worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import simpy
from msgspec.structs import replace

from asyncrl.capacity import command
from asyncrl.capacity.description import TREATMENT_NAMES, Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.engines import SimulatedEngines
from asyncrl.capacity.simulation import Forecast, simulate
from asyncrl.config.refusals import refusals
from asyncrl.config.schema import OldGroupsConfig, ReplayConfig, SamplerConfig, TrainConfig
from asyncrl.errors import ConfigError

EPISODE = TypicalEpisode(sampled=100, tokens=400, turns=2, tools_s=3.0)
LONG = TypicalEpisode(sampled=100, tokens=400, turns=2, tools_s=30.0)


def rates(**changes: Any) -> Rates:
    values: dict[str, Any] = {"tasks": [[EPISODE]], "pass_s": 0.01, "request_s": 0.001, "token_s": 1e-3}
    return Rates(**{**values, **changes})


def sizes(**changes: Any) -> Sizes:
    return Sizes(**{"engines": 1, "batch_size": 32, "group_size": 8, "concurrency": 32, **changes})


def forecast(given: Rates, **changes: Any) -> Forecast:
    return simulate(RunDescription(given, sizes(**changes)), steps=10)


@pytest.mark.slow
def test_a_synchronous_step_is_generation_then_scoring_then_training() -> None:
    found = forecast(rates(step_s=0.5, publish_s=0.25, label_s=0.125, transfer_s=0.0625, switch_s=1.0), max_lag=0)
    # All 32 episodes run together; the last of them is scored last; an engine takes the weights after the publish.
    generate_s, train_s = 100 * (0.01 + 32 * 0.001), 32 * 400 * 1e-3
    step_s = 0.0625 + 1.0 + generate_s + 3.0 + 32 * 0.125 + train_s + 0.5 + 0.25
    assert found.seconds_per_step == pytest.approx(step_s)
    assert found.trajectories_per_s == pytest.approx(32 / step_s)
    assert found.tokens_per_s == pytest.approx(32 * 100 / step_s)
    assert found.learner_idle == pytest.approx(1 - (train_s + 0.75) / step_s)
    assert found.scorer_idle == pytest.approx(1 - 4 / step_s)
    assert found.engine_idle == pytest.approx(1 - generate_s / step_s)
    assert found.lags == {0: 1.0}
    assert found.discarded == 0


@pytest.mark.slow
@pytest.mark.parametrize("learner_gpus", [1, 4])
def test_a_slow_learner_works_all_the_time_and_its_gpus_share_the_training(learner_gpus: int) -> None:
    found = forecast(rates(token_s=1e-2, step_s=1.0), max_lag=3, learner_gpus=learner_gpus)
    assert found.seconds_per_step == pytest.approx(1.0 + 32 * 400 * 1e-2 / learner_gpus)
    assert found.learner_idle == pytest.approx(0)
    assert set(found.lags) <= {0, 1, 2, 3}
    assert found.lags[3] > 0.5


@pytest.mark.slow
def test_slow_engines_generate_all_the_time_at_the_speed_of_their_requests() -> None:
    given = rates(tasks=[[replace(EPISODE, tools_s=0.0)]], token_s=0.0)
    found = forecast(given, max_lag=4)
    assert found.trajectories_per_s == pytest.approx(32 / (100 * (0.01 + 32 * 0.001)), rel=0.02)
    assert found.engine_idle == pytest.approx(0, abs=1e-6)
    assert found.requests == pytest.approx(32)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["fifo", "freshest"])
def test_groups_that_are_too_old_are_thrown_away_and_never_trained(sampler: str) -> None:
    found = forecast(rates(tasks=[[EPISODE] * 7, [EPISODE, LONG]], token_s=1e-5), max_lag=1, sampler=sampler)
    assert set(found.lags) <= {0, 1}
    assert 0 < found.discarded < 1
    assert sum(found.lags.values()) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [1, 3])
def test_old_groups_are_thrown_away_waited_for_or_masked(max_lag: int) -> None:
    given = rates(tasks=[[EPISODE] * 7, [EPISODE, LONG]], token_s=1e-5)
    found = {how: forecast(given, **treated(how, max_lag)) for how in TREATMENT_NAMES}
    assert found["wait"].discarded == 0
    assert "evicted" not in found["wait"].decided
    assert min(found["evict"].discarded, found["mask"].discarded) > 0
    assert found["mask"].trajectories_per_s > found["evict"].trajectories_per_s
    for each in found.values():
        assert set(each.lags) <= set(range(max_lag + 1))
        assert sum(each.lags.values()) == pytest.approx(1)


def treated(how: str, max_lag: int) -> dict[str, Any]:
    """The sizes of a run with a treatment of old groups."""
    given = sizes(max_lag=max_lag).treated(how)
    return {"max_lag": max_lag, "wait_s": 0.0 if given.wait_s == 0 else 1e3, "masks_old": given.masks_old}


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "fifo", "wait_s": 5.0},
        {"max_times_sampled": 2, "masks_old": True},
        {"max_lag": 0, "wait_s": 5.0},
        {"max_lag": 0, "masks_old": True},
    ],
)
def test_a_treatment_that_a_start_refuses_is_refused_in_the_same_words(given: dict[str, Any]) -> None:
    replay = ReplayConfig(
        max_lag=given.get("max_lag", 2),
        sampler=SamplerConfig(given.get("sampler", "oldest"), max_times_sampled=given.get("max_times_sampled", 1)),
        old_groups=OldGroupsConfig(given.get("wait_s", 0.0), given.get("masks_old", False)),
    )
    (refused,) = [line for line in refusals(TrainConfig(replay=replay)) if "old_groups" in line]
    with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
        sizes(**given)


@pytest.mark.parametrize("how", TREATMENT_NAMES)
def test_a_treatment_of_old_groups_is_known_by_its_name(how: str) -> None:
    assert sizes().treated(how).treatment == how
    assert sizes(wait_s=60.0).treated("both").wait_s == 60.0


def test_a_request_has_the_tokens_of_each_version_during_which_it_ran() -> None:
    environment = simpy.Environment()
    engines = SimulatedEngines(environment, 1, rates(pass_s=0.0, request_s=1.0))
    engines.generate(10.0)
    for version, at in ((1, 3.0), (2, 7.0)):
        environment.run(at)
        environment.run(environment.process(engines.switch(version)))
    environment.run(10.0)
    assert engines.versions_between(0.0, 10.0) == [(0, 3.0), (1, 4.0), (2, 3.0)]
    assert engines.versions_between(3.0, 7.0) == [(1, 4.0)]
    assert engines.versions_between(8.0, 9.0) == [(2, 1.0)]


@pytest.mark.slow
def test_a_version_of_several_steps_is_published_after_the_last_of_them() -> None:
    found = forecast(rates(token_s=1e-2, publish_s=8.0), max_lag=1, publish_every=4)
    # Ten steps after twelve others have two publishes.
    assert found.seconds_per_step == pytest.approx(32 * 400 * 1e-2 + 2 * 8.0 / 10)
    assert set(found.lags) <= {0, 1}


@pytest.mark.slow
def test_refused_groups_and_failed_episodes_cost_time() -> None:
    plain = forecast(rates(), max_lag=1)
    filtered = forecast(rates(zero_variance=0.5), max_lag=1, filter_zero_variance=True)
    failed = forecast(rates(failed=0.3), max_lag=1)
    assert filtered.discarded == pytest.approx(0.5, abs=0.2)
    assert filtered.trajectories_per_s < plain.trajectories_per_s
    assert failed.trajectories_per_s < plain.trajectories_per_s


@pytest.mark.parametrize("changes", [{"failed": 0.9}, {"zero_variance": 1.0}])
def test_a_run_that_would_stand_still_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"rates.{next(iter(changes))}"):
        forecast(rates(**changes), filter_zero_variance=True)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("turns", {"tasks": [[TypicalEpisode(sampled=100, tokens=400, turns=100_000)]]}),
        ("episodes", {"zero_variance": 0.9999}),
    ],
)
def test_a_simulation_that_would_take_hours_is_refused_at_once(what: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"too many {what} to simulate"):
        forecast(rates(**changes), filter_zero_variance=True)


@pytest.mark.slow
def test_scorers_without_work_are_idle_all_the_time_and_no_longer() -> None:
    found = forecast(rates(tasks=[[EPISODE] * 7 + [LONG]]), max_lag=1, scorers=3)
    assert found.scorer_idle == pytest.approx(1)


@pytest.mark.slow
def test_room_for_more_episodes_than_are_admitted_changes_nothing() -> None:
    assert forecast(rates(), concurrency=10**9).trajectories_per_s == pytest.approx(
        forecast(rates(), concurrency=3 * 32).trajectories_per_s
    )


@pytest.mark.slow
@pytest.mark.heavy
def test_a_large_run_is_as_fast_as_its_shards_together() -> None:
    tasks = [
        [replace(EPISODE, sampled=sampled, tools_s=tools_s) for tools_s in (1.0, 2.0, 9.0)] for sampled in (50, 150)
    ]
    given = rates(tasks=tasks, token_s=1e-4)
    small = forecast(given, batch_size=256, engines=8, scorers=8)
    large = forecast(given, batch_size=256 * 64, engines=8 * 64, scorers=8 * 64, learner_gpus=64)
    assert large.trajectories_per_s == pytest.approx(64 * small.trajectories_per_s)
    assert large.seconds_per_step == pytest.approx(small.seconds_per_step)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_forecast() -> None:
    given = RunDescription(rates(tasks=[[EPISODE, LONG]]), sizes())
    assert simulate(given, steps=5) == simulate(given, steps=5)
    assert simulate(given, steps=5) != simulate(given, steps=5, seed=1)


@pytest.mark.slow
def test_a_forecast_counts_the_lengths_of_what_the_age_bound_throws_away() -> None:
    tasks = [[replace(EPISODE, sampled=sampled, tools_s=0.0)] for sampled in (50, 100, 200, 2000)]
    found = forecast(rates(tasks=tasks, token_s=1e-5, request_s=0.0), max_lag=1, concurrency=64, masks_old=False)
    assert found.discarded > 0
    decided = found.decided
    assert decided["sampled"]["episodes"] == decided["trained"]["episodes"] + decided["evicted"]["episodes"]
    assert decided["trained"]["length"] < decided["sampled"]["length"] < decided["evicted"]["length"]
    assert decided["sampled"]["turns"] == 2
    notes = " ".join(command.notes(RunDescription(rates(tasks=tasks), sizes()), [found], found))
    assert f"evicted {decided['evicted']['length']:,.0f}" in notes
    assert ("biased sample" in notes) == bool(found.biased)
