"""The critic is trained alone in its warm-up: versions, lags and counts go on, and the policy stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.refusals import refusals
from asyncrl.config.schema import TrainConfig
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import (
    Run,
    assert_weights_equal,
    make_config,
    with_critic,
    with_demonstrations,
    write_demonstrations,
)

pytestmark = pytest.mark.slow

STEPS, ALONE = 5, 2


def warming(model: Path, folder: Path, steps: int = ALONE) -> TrainConfig:
    config = with_critic(make_config(model, folder, steps=STEPS))
    config.critic.warmup_steps = steps
    return config


@pytest.fixture(scope="module")
def trained(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run with a warm-up, and one without."""
    folder = tmp_path_factory.mktemp("runs")
    with_one, without = (Run(warming(model, folder / str(steps), steps)).train(ranks) for steps in (ALONE, 0))
    return with_one, without


def test_the_policy_moves_from_the_first_step_after_the_warm_up_on(trained: tuple[Run, Run]) -> None:
    run, _ = trained
    for version in range(1, ALONE + 1):
        assert_weights_equal(run.weights[version], run.weights[0])
    for version in range(ALONE, STEPS):
        with pytest.raises(AssertionError):
            assert_weights_equal(run.weights[version + 1], run.weights[version])


def test_the_critic_learns_from_the_first_step_on(trained: tuple[Run, Run]) -> None:
    run, without = trained
    norms = run.metrics.of("value/grad_norm")
    assert len(norms) == STEPS
    assert all(norm > 0 for norm in norms.values())
    assert norms[0] == pytest.approx(without.metrics.of("value/grad_norm")[0], rel=1e-5)
    assert run.metrics.of("value/bias")[1] == pytest.approx(without.metrics.of("value/bias")[1], abs=1e-5)


def test_versions_lags_and_counts_are_those_of_a_run_without_one(trained: tuple[Run, Run]) -> None:
    run, without = trained
    assert run.weights.keys() == without.weights.keys()
    for name in ("version", "lag/mean", "lag/max", "tokens", "trajectories_trained", "updates_skipped"):
        assert run.metrics.of(name) == without.metrics.of(name), name
    assert run.metrics.of("value/warmup") == {step: float(step < ALONE) for step in range(STEPS)}
    assert set(run.metrics.of("grad_norm")) == set(range(ALONE, STEPS))
    assert not any(run.metrics.of("updates_empty").values())


def test_an_adaptive_kl_keeps_its_coefficient_until_the_policy_moves(trained: tuple[Run, Run]) -> None:
    # The KL of a policy that does not move is 0, below its target. The step after the warm-up still finds 0.
    run, without = trained
    weights, others = (each.metrics.of("kl_reference/weight") for each in (run, without))
    assert [weights[step] for step in range(ALONE + 1)] == [0.1] * (ALONE + 1)
    assert weights[ALONE + 1] == others[1] < 0.1


def test_a_run_that_ends_in_the_warm_up_goes_on_with_the_same_bits(
    trained: tuple[Run, Run], model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    Run(warming(model, tmp_path), stop_at=1).until_stopped(ranks)
    resumed = Run(warming(model, tmp_path)).train(ranks)
    assert_weights_equal(resumed.final, trained[0].final)


def test_demonstrations_are_trained_from_the_first_one_on_once_the_warm_up_is_over(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config = with_demonstrations(warming(model, tmp_path))
    write_demonstrations(config, config.algorithm.sft.path or [], 4)
    run = Run(config).train(ranks)
    # A step takes two of the four.
    assert run.metrics.of("sft/epoch") == {step: max(0, step + 1 - ALONE) / 2 for step in range(STEPS)}
    assert set(run.metrics.of("sft/loss")) == set(range(ALONE, STEPS))


def test_a_warm_up_that_never_ends_is_refused(model: Path, tmp_path: Path) -> None:
    lines = refusals(warming(model, tmp_path, STEPS))
    assert any("critic.warmup_steps" in line and "would never be trained" in line for line in lines)
    assert not refusals(warming(model, tmp_path, STEPS - 1))
