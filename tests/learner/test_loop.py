from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.algorithms.compose import Algorithm
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import InvariantError, StoppedError
from asyncrl.learner.failures import StepFailedError, StepFailures
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.run import train
from asyncrl.types import BatchPlan, Trajectory
from tests.learner.support import VOCABULARY, FakeMetrics, FakePublisher, FakeReplay, make_config


class Run:
    """One training, with what it published, measured and asked for."""

    def __init__(self, config: TrainConfig, replay: FakeReplay | None = None) -> None:
        self._config = config
        self.replay = replay or FakeReplay(config)
        self.publisher = FakePublisher()
        self.metrics = FakeMetrics()
        self.stop = threading.Event()

    def train(self, ranks: Ranks) -> Run:
        train(self._config, ranks, self.replay, self.publisher, self.metrics, self.stop)
        return self

    @property
    def final(self) -> Mapping[str, Tensor]:
        return self.publisher.weights[max(self.publisher.weights)]


def assert_weights_close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], atol: float) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_weights_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_every_step_publishes_one_version_and_tells_what_it_measured(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path)).train(ranks)
    assert list(run.publisher.weights) == [0, 1, 2, 3, 4]
    assert [version for kind, version in run.replay.asked if kind == "published"] == [0, 1, 2, 3, 4]
    assert [steps for kind, steps in run.replay.asked if kind == "checkpointed"] == [2, 4]
    assert run.metrics.of("trajectories_trained") == {0: 8, 1: 16, 2: 24, 3: 32}
    assert run.metrics.of("version") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert run.metrics.of("weights/bytes") == dict.fromkeys(range(4), 5.0)
    row = run.metrics.rows[-1][1]
    assert {"loss", "grad_norm", "lr", "reward/mean", "outcome/mean", "tokens", "tokens_per_s", "idle"} <= row.keys()
    assert {f"seconds/{name}" for name in ("wait", "fetch", "proximal", "train", "publish", "checkpoint")} <= row.keys()
    assert row["grad_norm"] > 0
    assert sum(row["lag/histogram"]) == 8
    assert row["lag/max"] == 1


def test_with_one_update_a_step_the_trained_policy_is_the_proximal_one(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path)).train(ranks)
    assert run.metrics.of("update/kl") == pytest.approx(dict.fromkeys(range(4), 0), abs=1e-7)


def test_any_split_into_passes_trains_the_same(model: Path, ranks: Ranks, tmp_path: Path):
    whole = Run(make_config(model, tmp_path / "whole", micro_tokens=10_000, minibatches=2)).train(ranks)
    split = Run(make_config(model, tmp_path / "split", micro_tokens=40, minibatches=2)).train(ranks)
    assert_weights_close(whole.final, split.final, atol=1e-5)
    assert whole.metrics.of("loss") == pytest.approx(split.metrics.of("loss"), abs=1e-6)
    assert whole.metrics.of("grad_norm") == pytest.approx(split.metrics.of("grad_norm"), rel=1e-4)


class StoppingReplay(FakeReplay):
    """Asks the learner to stop when it wants the plan of step `last`."""

    def __init__(self, config: TrainConfig, last: int) -> None:
        super().__init__(config)
        self._last = last

    def plan(self, step: int) -> BatchPlan | None:
        if step == self._last:
            raise StoppedError("stop")
        return super().plan(step)


def test_an_interrupted_run_that_resumes_ends_with_the_same_bits(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path / "whole", steps=6)
    whole = Run(config).train(ranks)
    config = make_config(model, tmp_path / "broken", steps=6)
    with pytest.raises(StoppedError):
        Run(config, StoppingReplay(config, last=3)).train(ranks)
    resumed = Run(config).train(ranks)
    assert min(resumed.publisher.weights) == 2
    assert [step for kind, step in resumed.replay.asked if kind == "plan"] == [2, 3, 4, 5]
    for version, weights in resumed.publisher.weights.items():
        assert_weights_equal(weights, whole.publisher.weights[version])
    assert resumed.metrics.of("trajectories_trained")[5] == whole.metrics.of("trajectories_trained")[5]


def test_a_finished_run_that_starts_again_serves_its_last_weights(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    first = Run(config).train(ranks)
    again = Run(config).train(ranks)
    assert list(again.publisher.weights) == [4]
    assert_weights_equal(again.final, first.final)


def test_the_last_weights_have_a_version_of_their_own(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path, steps=5, publish_every=2)).train(ranks)
    assert list(run.publisher.weights) == [0, 1, 2, 3]
    assert run.metrics.of("version") == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}


def test_the_first_evaluation_is_complete_before_training_and_the_last_before_the_end(
    model: Path, ranks: Ranks, tmp_path: Path
):
    run = Run(make_config(model, tmp_path, eval_every=2)).train(ranks)
    asked = [each for each in run.replay.asked if each[0] in ("evaluate", "evaluation", "plan")]
    assert asked[:3] == [("evaluate", 0), ("evaluation", 0), ("plan", 0)]
    assert [version for kind, version in asked if kind == "evaluate"] == [0, 2, 4]
    assert run.metrics.of("eval/accuracy") == {0: 0.0, 2: 0.2, 4: 0.4}
    assert run.metrics.of("eval/version") == {0: 0, 2: 2, 4: 4}


def test_an_unanswered_evaluation_survives_a_restart(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path, steps=6, eval_every=3, checkpoint_every=4)
    with pytest.raises(StoppedError):
        Run(config, StoppingReplay(config, last=5)).train(ranks)
    resumed = Run(config).train(ranks)
    assert ("evaluate", 3) not in resumed.replay.asked
    assert resumed.metrics.of("eval/accuracy") == {3: 0.3, 6: 0.6}


def test_a_batch_that_teaches_nothing_is_a_counted_no_op(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    run = Run(config, FakeReplay(config, reward=0.5)).train(ranks)
    assert run.metrics.of("updates_empty") == {0: 1, 1: 2, 2: 3, 3: 4}
    assert run.metrics.of("updates_skipped")[3] == 0
    assert_weights_equal(run.publisher.weights[0], run.final)


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config(model, tmp_path)
    calls: list[Any] = []
    honest = Algorithm.loss

    def overflowing(self: Algorithm, logprobs: Tensor, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(args)
        loss, sums = honest(self, logprobs, *args)
        return (loss * float("inf") if len(calls) == 1 else loss), sums

    monkeypatch.setattr(Algorithm, "loss", overflowing)
    run = Run(config).train(ranks)
    assert run.metrics.of("updates_skipped") == {0: 1, 1: 1, 2: 1, 3: 1}
    assert_weights_equal(run.publisher.weights[0], run.publisher.weights[1])
    assert all(tensor.isfinite().all() for tensor in run.final.values())


def test_a_stop_between_two_passes_leaves_only_whole_checkpoints(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Run(make_config(model, tmp_path, steps=6))
    honest = Algorithm.loss

    def stopping(*args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if run.replay.asked[-1] == ("plan", 3):
            run.stop.set()
        return honest(*args)

    monkeypatch.setattr(Algorithm, "loss", stopping)
    with pytest.raises(StoppedError):
        run.train(ranks)
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert max(run.publisher.weights) == 3


def test_the_exported_folder_holds_the_last_weights(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path)).train(ranks)
    folder = tmp_path / "run" / "model"
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert_weights_equal({name: tensor.data for name, tensor in exported.named_parameters()}, run.final)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert [each.name for each in folder.parent.iterdir() if each.name.startswith(".tmp")] == []


def test_the_learning_rate_warms_up(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path, warmup_steps=2)).train(ranks)
    assert run.metrics.of("lr") == pytest.approx({0: 5e-4, 1: 1e-3, 2: 1e-3, 3: 1e-3})


class SkippingReplay(FakeReplay):
    """Has a plan of one step that somebody skipped; its data may be gone."""

    def plan(self, step: int) -> BatchPlan | None:
        plan = super().plan(step)
        return replace(plan, skipped="poison") if plan is not None and step == 1 else plan

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        assert not any(each.startswith("1.") for each in ids)
        return super().fetch(ids)


def test_a_skipped_plan_trains_nothing_and_its_version_is_published_all_the_same(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path)
    run = Run(config, SkippingReplay(config)).train(ranks)
    assert list(run.publisher.weights) == [0, 1, 2, 3, 4]
    assert_weights_equal(run.publisher.weights[1], run.publisher.weights[2])
    assert run.metrics.of("trajectories_trained") == {0: 8, 2: 16, 3: 24}
    assert run.metrics.of("steps_skipped") == {0: 0, 1: 1, 2: 1, 3: 1}
    assert [steps for kind, steps in run.replay.asked if kind == "checkpointed"] == [2, 4]


class PoisonedReplay(FakeReplay):
    """Has a trajectory of step 1 whose token id the policy does not know."""

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        found = super().fetch(ids)
        if self.asked[-1] == ("plan", 1):
            tokens = found[0].tokens.copy()
            tokens[0] = VOCABULARY
            found[0] = replace(found[0], tokens=tokens)
        return found


def test_a_step_that_fails_again_and_again_says_how_to_skip_its_plan(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    for _ in range(2):
        with pytest.raises(InvariantError, match=f"token id {VOCABULARY}; the policy has {VOCABULARY} ids"):
            Run(config, PoisonedReplay(config)).train(ranks)
    for times in (3, 4):
        with pytest.raises(StepFailedError, match=rf"step 1 has failed {times} times(.|\n)*skip-plan 1 --reason"):
            Run(config, PoisonedReplay(config)).train(ranks)
    Run(config, SkippingReplay(config)).train(ranks)


def test_failures_of_another_step_kind_or_after_a_success_are_counted_anew(tmp_path: Path):
    def fail(step: int, error: Exception) -> None:
        with pytest.raises(type(error)), StepFailures(tmp_path / "failures.json")(step):
            raise error

    for _ in range(2):
        fail(3, ValueError("x"))
    fail(4, ValueError("x"))
    fail(4, KeyError("x"))
    fail(4, KeyError("y"))
    with StepFailures(tmp_path / "failures.json")(4):
        pass
    fail(4, KeyError("z"))
    fail(4, StoppedError("not a failure"))
    fail(4, KeyError("z"))
    with pytest.raises(StepFailedError, match="step 4 has failed 3 times, at last with KeyError"):
        fail(4, KeyError("z"))
