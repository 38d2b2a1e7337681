"""The evaluator publishes the model with its own log-probs, so that an engine with other weights plays nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actor import __main__ as actor
from asyncrl.commands.evaluate.evaluator import __main__ as evaluator
from asyncrl.commands.evaluate.progress import VERSION
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, TooManyFailuresError
from asyncrl.learner import from_config
from asyncrl.learner.batch import from_config as batches
from asyncrl.learner.from_config import run_settings
from asyncrl.learner.model.canary import canary_of, canary_of_model
from asyncrl.learner.model.loading import read_model
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.weights.buckets import Bucket, GatheredBucket, on_host
from asyncrl.weights.canary import Canary, CanaryCheck, CanaryError
from tests.engine.support import swapped_layers
from tests.engine.test_embedded import serving
from tests.learner.support import make_config, write_model
from tests.mixtures import save_mixture
from tests.one_rank import one_rank
from tests.vision import save_vision_model

pytestmark = pytest.mark.slow


class Replay:
    """Every attempt is scored as soon as it is asked for."""

    def published(self, version: int) -> None: ...
    def evaluate(self, version: int) -> None: ...
    def close(self) -> None: ...

    def evaluation(self, version: int) -> int:
        return version


class Publisher:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.canary: Canary | None = None

    def publish(
        self, version: int, plan: Sequence[Bucket], buckets: Iterable[GatheredBucket], canary: Canary | None = None
    ) -> None:
        self.canary = canary
        for filled in buckets:
            self.weights |= {name: tensor.clone() for name, tensor in on_host(filled).items()}

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank() as ranks:
        yield ranks


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainConfig], Publisher]:
    """Return a function that runs the evaluator with a configuration, and returns the publisher that it used."""
    publisher = Publisher()
    monkeypatch.setattr(batches, "open_batches", lambda *_: Replay())
    monkeypatch.setattr(evaluator.process, "stop_on_signals", threading.Event)
    monkeypatch.setattr(from_config, "open_publisher", lambda *_: publisher)

    def evaluate(config: TrainConfig) -> Publisher:
        evaluator.run(config)
        return publisher

    return evaluate


async def test_an_engine_repeats_the_canary_of_the_evaluated_model_and_one_with_other_weights_does_not(
    evaluated: Callable[[TrainConfig], Publisher], tmp_path: Path
) -> None:
    config = make_config(write_model(tmp_path / "model"), tmp_path)
    config.model.dtype = "float32"
    publisher = evaluated(config)
    assert publisher.canary is not None
    check = CanaryCheck(VERSION, publisher.canary, "zmq")
    other = read_model(ModelConfig(str(write_model(tmp_path / "other", seed=1))))
    async with serving(other, initial_version=-1) as engine:
        with pytest.raises(CanaryError, match="differ from the learner's"):
            await engine.update_weights(VERSION, swapped_layers(publisher.weights), check)
        await engine.update_weights(VERSION, publisher.weights, check)
        counters = engine.stats().counters
        assert counters["canary_difference"] < 1e-4 < counters["canary_allowed"]


def test_an_evaluation_sends_no_canary_where_it_is_turned_off(
    evaluated: Callable[[TrainConfig], Publisher], tmp_path: Path
) -> None:
    config = make_config(write_model(tmp_path / "model"), tmp_path)
    config.weights.canary = False
    publisher = evaluated(config)
    assert publisher.weights
    assert publisher.canary is None


@pytest.mark.parametrize("kind", ["dense", "mixture", "vision"])
def test_the_canary_of_a_plain_model_is_that_of_the_policy(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    saved: dict[str, Callable[[Path], Any]] = {
        "dense": write_model,
        "mixture": lambda folder: save_mixture(folder, "qwen3_moe"),
        "vision": save_vision_model,
    }
    saved[kind](tmp_path / "model")
    config = make_config(tmp_path / "model", tmp_path)
    config.model.dtype = "float32"
    plain = canary_of_model(read_model(config.model), config.model.path, run_settings(config).canary)
    learners = canary_of(load_policy(config.model, 1.0, ranks, 64), 0, run_settings(config).canary, ranks)
    assert plain is not None
    assert learners is not None
    assert (plain.tokens, plain.dtype) == (learners.tokens, learners.dtype)
    np.testing.assert_allclose(plain.logprobs, learners.logprobs, atol=1e-4)


@pytest.mark.parametrize(("max_tokens", "length"), [(1, 2), (3, 2), (32, 31), (33, 32), (4096, 32)])
def test_a_canary_leaves_room_for_a_token_in_the_context_of_a_server(
    max_tokens: int, length: int, ranks: Ranks, tmp_path: Path
) -> None:
    """SGLang refuses an input that is as long as its context, which may be as long as the longest episode."""
    config = make_config(write_model(tmp_path / "model"), tmp_path)
    config.actor.max_tokens = max_tokens
    policy = load_policy(config.model, 1.0, ranks, 64)
    for canary in (
        canary_of_model(read_model(config.model), config.model.path, run_settings(config).canary),
        canary_of(policy, 0, run_settings(config).canary, ranks),
    ):
        assert canary is not None
        assert len(canary.tokens) == length


def test_a_model_without_finite_log_probs_is_not_evaluated(tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path / "model"), tmp_path)
    model = read_model(config.model)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match="not finite"):
        canary_of_model(model, config.model.path, run_settings(config).canary)


async def test_an_engine_that_fails_its_canary_for_good_ends_a_run_that_has_no_other_version() -> None:
    class Failing:
        async def run(self, _: Any) -> None:
            raise CanaryError("version 0 is not what it says")

    failing: Any = Failing()
    with pytest.raises(TooManyFailuresError, match="version 0 is not what it says, and no other version follows"):
        await actor._follow(failing, failing, is_only_version=True)
    with pytest.raises(CanaryError):
        await actor._follow(failing, failing, is_only_version=False)
