"""Training in float16 gives the updates of float32, but for rounding: an overflow costs one update, never a weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.loss_scale import INTERVAL, LossScale
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import Run, assert_weights_equal, make_config, with_critic

pytestmark = pytest.mark.slow


def test_the_scale_is_that_of_torchs_own_scaler() -> None:
    """Over random overflows, also so many in a row that the scale doubles in between."""
    torch.manual_seed(0)
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    for number in range(2 * INTERVAL + 30):
        is_finite = not (number < 8 or number == INTERVAL + 20)
        weight.grad = torch.tensor([1.0 if is_finite else math.inf])
        theirs.scale(weight.sum())
        theirs.step(optimizer)
        theirs.update()
        assert ours.follow(is_finite) is not is_finite
        assert ours.scale == theirs.get_scale()


def test_a_gradient_that_is_never_finite_is_no_overflow_once_the_scale_cannot_fall() -> None:
    scale = LossScale()
    assert [scale.follow(False) for _ in range(18)] == [True] * 16 + [False] * 2
    assert scale.scale == 1.0


class Linear(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)


def after_updates(losses: list[float], dtype: str) -> tuple[Trainable[Linear], list[Any]]:
    """A model whose gradient is a loss times that of its sum, after an update for each loss."""
    model = Trainable(Linear(), 1e-2, LearnerConfig(steps=10, max_grad_norm=2.0), dtype)
    results = []
    for step, loss in enumerate(losses):
        (model.loss_factor * loss * sum(each.sum() for each in model.module.parameters())).backward()
        results.append(model.update(step))
    return model, results


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def test_a_scale_changes_neither_the_norm_nor_the_update() -> None:
    (plain, expected), (scaled, got) = (after_updates([0.3, 7.0, 1e-3], dtype) for dtype in ("float32", "float16"))
    assert_weights_equal(weights(plain.module), weights(scaled.module))
    assert [each.norm for each in got] == [each.norm for each in expected]


def test_an_overflow_skips_one_update_and_halves_the_scale() -> None:
    (plain, _), (scaled, results) = after_updates([0.3], "float32"), after_updates([0.3, math.inf], "float16")
    assert [each.overflowed for each in results] == [False, True]
    assert_weights_equal(weights(plain.module), weights(scaled.module))
    assert scaled.loss_scale is not None
    assert scaled.loss_scale.state() == [2.0**15, 0.0]


def half(config: Any) -> Any:
    config.model.dtype = "float16"
    return config


@pytest.fixture(scope="module")
def trained(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    make = {"float32": lambda config: config, "float16": half}
    return {name: Run(with_critic(each(make_config(model, folder / name)))).train(ranks) for name, each in make.items()}


def test_a_run_in_float16_trains_as_one_in_float32_within_rounding(trained: dict[str, Run], model: Path) -> None:
    wide, narrow = trained["float32"], trained["float16"]
    start = wide.weights[0]
    moved = max(float((wide.final[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    # AdamW divides by the gradient's size, so that one that is all rounding moves a weight as far as any other.
    for name, each in wide.final.items():
        difference = (narrow.final[name].float() - each).abs()
        assert float(difference.mean()) < 0.1 * moved, name
    for wanted, got in zip(*(each.metrics.of("grad_norm").values() for each in (wide, narrow)), strict=True):
        assert got == pytest.approx(wanted, rel=0.05)


def test_the_metrics_have_the_scale_and_the_overflows(trained: dict[str, Run]) -> None:
    metrics = trained["float16"].metrics
    assert metrics.of("loss_scale") == metrics.of("value/loss_scale") == dict.fromkeys(range(4), 2.0**16)
    assert metrics.of("updates_overflowed") == metrics.of("updates_skipped") == dict.fromkeys(range(4), 0.0)
    assert not trained["float32"].metrics.of("loss_scale")


FIRST = 2.0**21
"""Some gradients of the tiny policy overflow with it."""


def test_an_overflow_in_a_run_costs_one_update_and_is_counted_and_a_resume_goes_on_with_the_scale(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale, "__init__", lambda self: self.restore([FIRST, 0]))
    whole = Run(half(make_config(model, tmp_path / "whole", steps=6))).train(ranks)
    overflowed = whole.metrics.of("updates_overflowed")
    assert overflowed[0] == 1
    scales = whole.metrics.of("loss_scale")
    assert scales == {step: FIRST / 2**count for step, count in overflowed.items()}
    assert not any(whole.metrics.of("updates_skipped").values())
    assert_weights_equal(whole.weights[0], whole.weights[1])
    assert any(not torch.equal(whole.weights[1][name], whole.final[name]) for name in whole.final)
    Run(half(make_config(model, tmp_path / "cut", steps=6)), stop_at=4).until_stopped(ranks)
    resumed = Run(half(make_config(model, tmp_path / "cut", steps=6))).train(ranks)
    assert resumed.metrics.of("loss_scale") == {step: scales[step] for step in (4, 5)}
    assert_weights_equal(resumed.final, whole.final)


def test_weights_that_float16_cannot_hold_are_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.model.norm.weight.data[0] = 1e5
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"weights beyond 65504.*bfloat16"):
        load_policy(ModelConfig(str(tmp_path), dtype="float16"), 1.0, ranks, 64)


def test_a_model_that_overflows_float16_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.model.layers[0].mlp.down_proj.weight.data *= 2e4
    policy.model.layers[1].mlp.down_proj.weight.data *= 2e4
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"overflow float16.*bfloat16"):
        load_policy(ModelConfig(str(tmp_path), dtype="float16"), 1.0, ranks, 64)
