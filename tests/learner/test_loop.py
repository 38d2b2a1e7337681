from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.changes import ConfigChange
from asyncrl.config.locations import SOLVED_FILE
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.errors import InvariantError, StoppedError, WeightsError
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.from_config import run_settings
from asyncrl.learner.model.canary import canary_of
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.failures import StepFailedError, StepFailures
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.run import remove_repeated
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.lines import read_lines
from asyncrl.types import BatchPlan, Role, Trajectory
from asyncrl.weights.canary import canary_tokens
from tests.engine.support import plain_logprobs
from tests.learner.support import VOCABULARY, PlannedReplay, Run, assert_weights_equal, make_config, with_critic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of six steps without any event, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    config = make_config(model, folder, steps=6)
    config.observe.profile_steps = [2]
    return Run(config).train(ranks), folder / "run"


def test_every_step_publishes_one_version_and_reports_its_metrics(whole: tuple[Run, Path]):
    run, _ = whole
    assert list(run.weights) == run.replay.called("published") == [0, 1, 2, 3, 4, 5, 6]
    assert run.replay.called("checkpointed") == [2, 4, 6]
    assert run.metrics.of("trajectories_trained") == {step: 8 * (step + 1) for step in range(6)}
    assert run.metrics.of("version") == {step: step for step in range(6)}
    assert run.metrics.of("weights/bytes") == dict.fromkeys(range(6), 5.0)
    row = run.metrics.rows[-1][1]
    assert {"loss", "grad_norm", "lr", "reward/mean", "outcome/mean", "tokens", "tokens_per_s", "idle"} <= row.keys()
    assert {f"seconds/{name}" for name in ("wait", "fetch", "proximal", "train", "publish", "checkpoint")} <= row.keys()
    assert row["grad_norm"] > 0
    assert row["memory/peak_gb"] > 0
    assert row["lag/0"] + row["lag/1"] == 8
    assert row["lag/max"] == 1
    assert [step for step, _ in run.metrics.rows] == list(range(6)), "all values of a step are in one row"
    # With one update a step the trained policy is the proximal one.
    assert run.metrics.of("update/kl") == pytest.approx(dict.fromkeys(range(6), 0), abs=1e-7)


def test_a_chosen_step_has_a_trace_of_its_phases_operators_and_memory(whole: tuple[Run, Path]):
    (path,) = (whole[1] / "profile").iterdir()
    assert path.name == "step-000002-rank-0.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert {"fetch", "train", "publish", "aten::mm", "[memory]"} <= {each["name"] for each in events}
    assert sum(each["name"] == "train" for each in events) == 1


def test_a_chosen_step_has_a_snapshot_of_a_gpus_memory_and_without_a_gpu_a_warning(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(model, tmp_path, steps=2)
    config.observe.memory_steps = [1]
    Run(config).train(ranks)
    written = [path.name for path in (tmp_path / "run").glob("profile/*")]
    on_gpu = torch.cuda.is_available()
    assert written == (["step-000001-rank-0-memory.pickle"] if on_gpu else [])
    assert ("observe.memory_steps is ignored" in caplog.text) != on_gpu


@pytest.mark.parametrize("correction", ["truncate", "mask", "reject"])
def test_the_training_forward_gives_the_same_bits_as_a_proximal_pass(
    model: Path, ranks: Ranks, tmp_path: Path, correction: str
):
    final = []
    for proximal in ("recompute", "auto"):
        config = make_config(model, tmp_path / proximal, steps=3)
        bounds = {"reject": {"high": 3.0}, "mask": {"low": 0.01, "high": 20.0}}
        config.algorithm.correction = [PartConfig(correction, bounds.get(correction, {}))]
        config.algorithm.proximal = proximal
        final.append(Run(config).train(ranks))
    assert_weights_equal(final[0].final, final[1].final)
    keep = ("loss", "grad_norm", "masked/any", "weight/mean", "mismatch/kl")
    assert [final[0].metrics.of(name) for name in keep] == [final[1].metrics.of(name) for name in keep]
    assert 0 <= max(final[0].metrics.of("masked/any").values()) < 1


@pytest.mark.parametrize("loss", ["ipo", "reinforce", "gpg"])
def test_several_updates_by_a_loss_that_reads_no_proximal_policy_need_no_pass_before_them(
    model: Path, ranks: Ranks, tmp_path: Path, loss: str
):
    runs = []
    for proximal in ("recompute", "auto"):
        config = make_config(model, tmp_path / proximal, steps=2, minibatches=2)
        config.algorithm.loss = PartConfig(loss)
        config.algorithm.correction = []
        config.algorithm.proximal = proximal
        runs.append(Run(config).train(ranks))
    assert_weights_equal(runs[0].final, runs[1].final)
    for name in ("loss", "grad_norm"):
        assert runs[0].metrics.of(name) == runs[1].metrics.of(name)


def test_the_exported_folder_holds_the_last_weights(whole: tuple[Run, Path]):
    run, folder = whole
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert_weights_equal({name: tensor.data for name, tensor in exported.named_parameters()}, run.final)
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    assert [each.name for each in folder.iterdir() if each.name.startswith(".tmp")] == []


@pytest.mark.parametrize(("event", "kept"), [("die_at", 2), ("stop_at", 3)])
def test_an_interrupted_run_that_resumes_ends_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path, whole: tuple[Run, Path], event: str, kept: int
):
    """The run goes on from the newest checkpoint. A run that is asked to stop saves its finished steps first."""
    config = make_config(model, tmp_path, steps=6)
    stopped = Run(config, **{event: 3}).until_stopped(ranks)
    assert list(stopped.metrics.of("loss")) == [0, 1, 2]
    resumed = Run(config).train(ranks)
    assert min(resumed.weights) == kept
    assert resumed.replay.called("plan") == list(range(kept, 6))
    for version, weights in resumed.weights.items():
        assert_weights_equal(weights, whole[0].weights[version])
    assert resumed.metrics.of("trajectories_trained")[5] == whole[0].metrics.of("trajectories_trained")[5]
    again = Run(config).train(ranks)
    assert list(again.weights) == [6], "a finished run that starts again serves its last weights"
    assert_weights_equal(again.final, whole[0].final)


def test_a_run_whose_tasks_are_solved_ends_with_its_newest_weights_and_can_go_on(
    model: Path, ranks: Ranks, tmp_path: Path, whole: tuple[Run, Path]
):
    config, folder = make_config(model, tmp_path, steps=6, eval_every=2), tmp_path / "run"
    solved = Run(config, solved_at=3).train(ranks)
    assert list(solved.metrics.of("loss")) == [0, 1, 2]
    # The one of step 2 is not reported if it becomes complete only after step 3.
    assert solved.replay.called("checkpointed")[-1] == 3
    assert list(solved.evaluations.of("eval/version")) == [0, 2, 3], "the last weights are evaluated, too"
    assert (folder / SOLVED_FILE).read_text() == "the policy solves these tasks"
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert_weights_equal({name: tensor.data for name, tensor in exported.named_parameters()}, solved.final)
    resumed = Run(config).train(ranks)
    assert resumed.replay.called("plan") == [3, 4, 5]
    assert list(resumed.evaluations.of("eval/version")) == [2, 4, 6], "the checkpoint has no result of step 2 yet"
    assert_weights_equal(resumed.final, whole[0].final)
    assert not (folder / SOLVED_FILE).exists()


def test_steps_of_no_published_version_are_not_saved_when_the_tasks_are_solved(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path, steps=6, publish_every=2, checkpoint_every=6, eval_every=6)
    solved = Run(config, solved_at=3).train(ranks)
    assert solved.replay.called("checkpointed") == []
    assert list(solved.evaluations.of("eval/version")) == [0]


def test_the_last_weights_have_a_version_of_their_own_and_the_learning_rate_warms_up(
    model: Path, ranks: Ranks, tmp_path: Path
):
    run = Run(make_config(model, tmp_path, steps=5, publish_every=2, warmup_steps=2)).train(ranks)
    assert list(run.weights) == [0, 1, 2, 3]
    assert run.metrics.of("version") == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    assert run.metrics.of("lr") == pytest.approx({0: 5e-4, 1: 1e-3, 2: 1e-3, 3: 1e-3, 4: 1e-3})


def test_the_first_evaluation_is_complete_before_training_and_the_last_before_the_end(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Run(make_config(model, tmp_path, eval_every=2, checkpoint_every=2, keep_best=1)).train(ranks)
    calls = [each for each in run.replay.calls if each[0] in ("evaluate", "evaluation", "plan")]
    assert calls[:3] == [("evaluate", 0), ("evaluation", 0), ("plan", 0)]
    assert run.replay.called("evaluate") == [0, 2, 4]
    assert run.evaluations.of("eval/accuracy") == {0: 0.0, 2: 0.2, 4: 0.4}
    assert run.evaluations.of("eval/version") == {0: 0, 2: 2, 4: 4}
    warned = [each for each in caplog.messages if "rated by newer weights" in each]
    assert ["step 4 " in each for each in warned] == [True], "this evaluation alone has mostly tokens of newer weights"


def test_an_unanswered_evaluation_survives_a_restart(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path, steps=6, eval_every=3, checkpoint_every=4)
    Run(config, stop_at=5).until_stopped(ranks)
    resumed = Run(config).train(ranks)
    assert 3 not in resumed.replay.called("evaluate")
    assert resumed.evaluations.of("eval/accuracy") == {3: 0.3, 6: 0.6}


def test_a_batch_that_teaches_nothing_is_a_counted_no_op_without_a_warning(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Run(make_config(model, tmp_path, steps=2), reward=lambda step: 0.5).train(ranks)
    assert run.metrics.of("updates_empty") == {0: 1, 1: 2}
    assert run.metrics.of("updates_skipped")[1] == 0
    assert_weights_equal(run.weights[0], run.final)
    assert "gradient" not in caplog.text


def test_a_batch_of_turns_under_narrow_grammars_is_a_counted_no_op_too(model: Path, ranks: Ranks, tmp_path: Path):
    class UnderGrammars(PlannedReplay):
        def batch(self, step: int) -> list[tuple[Trajectory, float]]:
            return [(under_grammar(each), reward) for each, reward in super().batch(step)]

    def under_grammar(trajectory: Trajectory) -> Trajectory:
        turns = tuple(
            turn._replace(grammar="regex") if turn.role is Role.ASSISTANT else turn for turn in trajectory.turns
        )
        mass = np.where(trajectory.loss_mask, 0.94, 1).astype(np.float32)
        return structs.replace(trajectory, turns=turns, grammar_mass=mass)

    config = make_config(model, tmp_path, steps=2)
    run = Run(config, replay=UnderGrammars(config)).train(ranks)
    assert run.metrics.of("updates_empty") == {0: 1, 1: 2}
    assert run.metrics.of("masked/grammar") == {0: 1, 1: 1}
    assert_weights_equal(run.weights[0], run.final)
    trained = make_config(model, tmp_path / "trained", steps=2, min_grammar_mass=0.9)
    assert Run(trained, replay=UnderGrammars(trained)).train(ranks).metrics.of("updates_empty") == {0: 0, 1: 0}


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(model, tmp_path)
    config.algorithm.advantage = PartConfig("dr_grpo")
    rewards = iter([3e38, -3e38] * 4)
    run = Run(config, reward=lambda step: next(rewards) if step == 1 else step % 7).train(ranks)
    assert run.metrics.of("updates_skipped") == {0: 0, 1: 1, 2: 1, 3: 1}
    assert_weights_equal(run.weights[1], run.weights[2])
    assert all(tensor.isfinite().all() for tensor in run.final.values())
    assert "no update of" in caplog.text


def test_too_large_gradients_are_left_out_and_counted_and_more_steps_stretch_the_schedule(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(model, tmp_path, skip_grad_norm=1e-9, schedule="linear", steps=4)
    run = Run(config, changes=[ConfigChange(2, "learner.steps", 3, 4, 0)]).train(ranks)
    assert run.metrics.of("updates_too_large") == {0: 1, 1: 2, 2: 3, 3: 4}
    assert run.metrics.of("updates_skipped")[3] == 0
    assert run.metrics.of("lr") == pytest.approx({0: 1e-3, 1: 2e-3 / 3, 2: 5e-4, 3: 2.5e-4})
    assert_weights_equal(run.weights[0], run.final)
    assert "learner.skip_grad_norm" in caplog.text


def test_a_resumed_run_leaves_out_the_same_unusually_large_gradients(model: Path, ranks: Ranks, tmp_path: Path):
    values = {"steps": 8, "minibatches": 2, "skip_grad_norm_factor": 1.0}
    whole = Run(make_config(model, tmp_path / "whole", **values)).train(ranks)
    config = make_config(model, tmp_path / "resumed", **values)
    Run(config, stop_at=7).until_stopped(ranks)
    resumed = Run(config).train(ranks)
    assert_weights_equal(resumed.final, whole.final)
    left_out = whole.metrics.of("updates_too_large")
    assert left_out[3] == 0
    assert 0 < left_out[7] < 8
    assert resumed.metrics.of("updates_too_large")[7] == left_out[7]


class StopBetweenPasses(threading.Event):
    """Set once the learner has looked at it `looks` times after it got the plan of step 3."""

    def __init__(self, replay: PlannedReplay, looks: int) -> None:
        super().__init__()
        self._replay = replay
        self._looks = looks

    def is_set(self) -> bool:
        if self._replay.calls[-1:] == [("plan", 3)]:
            self._looks -= 1
        return self._looks < 0


@pytest.mark.parametrize(
    ("updates", "looks", "kept"), [(1, 4, {"step-000002", "step-000003"}), (4, 8, {"step-000002"})]
)
def test_a_stop_between_two_passes_leaves_only_whole_checkpoints(
    model: Path, ranks: Ranks, tmp_path: Path, updates: int, looks: int, kept: set[str]
):
    """One of the steps that were done; not after the first of several updates."""
    run = Run(make_config(model, tmp_path, steps=6, micro_tokens=40, minibatches=updates))
    run.stop = StopBetweenPasses(run.replay, looks)
    run.until_stopped(ranks)
    assert {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()} == kept
    assert max(run.weights) == 3
    assert list(run.metrics.of("loss")) == [0, 1, 2]


def test_a_step_that_a_stop_cut_short_moves_an_adaptive_kl_only_once(model: Path, ranks: Ranks, tmp_path: Path):
    def config(name: str) -> TrainConfig:
        return with_critic(make_config(model, tmp_path / name, steps=6))

    whole = Run(config("whole")).train(ranks)
    cut = Run(config("cut"))
    cut.stop = StopBetweenPasses(cut.replay, 12)
    cut.until_stopped(ranks)
    resumed = Run(config("cut")).train(ranks)
    assert min(resumed.weights) == 3
    assert resumed.metrics.of("kl_reference/weight")[3] == whole.metrics.of("kl_reference/weight")[3]
    assert_weights_equal(resumed.final, whole.final)


def test_a_version_has_the_same_weights_after_a_stop_between_two_versions(model: Path, ranks: Ranks, tmp_path: Path):
    def config(name: str) -> TrainConfig:
        return make_config(model, tmp_path / name, steps=6, publish_every=2)

    whole = Run(config("whole")).train(ranks)
    Run(config("stopped"), stop_at=3).until_stopped(ranks)
    resumed = Run(config("stopped")).train(ranks)
    assert list(resumed.weights) == [1, 2, 3]
    for version, weights in resumed.weights.items():
        assert_weights_equal(weights, whole.weights[version])


class StopWhilePublishing(threading.Event):
    """Set while the weights after step 3 are published."""

    def __init__(self, replay: PlannedReplay) -> None:
        super().__init__()
        self._replay = replay

    def is_set(self) -> bool:
        return ("published", 3) in self._replay.calls


def test_a_stop_after_the_update_of_a_step_keeps_and_reports_the_step(model: Path, ranks: Ranks, tmp_path: Path):
    run = Run(make_config(model, tmp_path, steps=6, minibatches=2))
    run.stop = StopWhilePublishing(run.replay)
    run.until_stopped(ranks)
    assert {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-000002", "step-000003"}
    assert list(run.metrics.of("loss")) == [0, 1, 2]


def test_a_skipped_plan_trains_nothing_and_its_version_is_published_all_the_same(
    model: Path, ranks: Ranks, tmp_path: Path
):
    run = Run(make_config(model, tmp_path), skip=1).train(ranks)
    assert run.replay.ahead == [1, 3], "a step that trains nothing leaves no time to fetch another"
    assert list(run.weights) == [0, 1, 2, 3, 4]
    assert_weights_equal(run.weights[1], run.weights[2])
    assert run.metrics.of("trajectories_trained") == {0: 8, 2: 16, 3: 24}
    assert run.metrics.of("steps_skipped") == {0: 0, 1: 1, 2: 1, 3: 1}
    assert run.replay.called("checkpointed") == [2, 4]


class SkippedLate(PlannedReplay):
    """Skips the plan of step 2 after the learner got it ahead."""

    def plan(self, step: int) -> BatchPlan | None:
        if step == 2:
            assert self.ahead[-1] == step
            self.core.skip(step)
        return super().plan(step)


class NothingAhead(PlannedReplay):
    def plan_ahead(self, step: int) -> BatchPlan | None:
        return None


def test_batches_that_are_fetched_ahead_train_the_same_and_may_still_be_skipped(
    model: Path, ranks: Ranks, tmp_path: Path, whole: tuple[Run, Path]
):
    config = make_config(model, tmp_path / "alone", steps=6)
    assert whole[0].replay.ahead == [1, 2, 3, 4, 5]
    assert_weights_equal(Run(config, NothingAhead(config)).train(ranks).final, whole[0].final)
    config = make_config(model, tmp_path / "skipped")
    # It is skipped because it cannot be fetched.
    run = Run(config, SkippedLate(config, poison=2)).train(ranks)
    assert run.metrics.of("steps_skipped") == {0: 0, 1: 0, 2: 1, 3: 1}
    assert_weights_equal(run.weights[2], run.weights[3])


def test_a_step_that_fails_again_and_again_says_how_to_skip_its_plan(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path, steps=2)
    for _ in range(2):
        run = Run(config, poison=1)
        with pytest.raises(InvariantError, match=f"token id {VOCABULARY}; the policy has {VOCABULARY} ids"):
            run.train(ranks)
        assert max(run.weights) == 1, "the batch was fetched while step 0 trained, which it does not harm"
    for times in (3, 4):
        with pytest.raises(StepFailedError, match=rf"step 1 has failed {times} times(.|\n)*skip-plan 1 --reason"):
            Run(config, poison=1).train(ranks)
    Run(config, skip=1).train(ranks)


def test_failures_of_another_step_or_type_or_after_a_success_are_counted_anew(tmp_path: Path):
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


def test_every_version_has_the_canary_of_its_own_weights_also_after_a_resume(
    model: Path, ranks: Ranks, tmp_path: Path, whole: tuple[Run, Path]
):
    run, folder = whole
    plain = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert list(run.push.canaries) == list(run.weights)
    for version, canary in run.push.canaries.items():
        assert canary is not None
        assert canary.tokens == canary_tokens(3, VOCABULARY)
        plain.load_state_dict(run.weights[version], strict=False)
        expected = plain_logprobs(plain, np.array(canary.tokens, np.int32), 1.0)
        np.testing.assert_allclose(canary.logprobs, expected, atol=1e-4)
    config = make_config(model, tmp_path, steps=6)
    Run(config, stop_at=3).until_stopped(ranks)
    resumed = Run(config).train(ranks)
    assert resumed.push.canaries == {version: run.push.canaries[version] for version in resumed.weights}


def test_weights_without_finite_log_probs_are_not_published_and_a_canary_may_be_left_out(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path, steps=1)
    config.weights.canary = False
    run = Run(config).train(ranks)
    assert run.push.canaries == {0: None, 1: None}
    policy = load_policy(config.model, 1.0, ranks, 64)
    config.weights.canary = True
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(WeightsError, match="version 5 is not published, since the learner's own log-probs"):
        canary_of(policy, 5, run_settings(config).canary, ranks)


@pytest.mark.parametrize(("is_due", "kept"), [(False, [0, 8, 10]), (True, [0, 8])])
def test_a_run_that_goes_on_keeps_its_last_evaluation_unless_it_makes_it_again(
    is_due: bool, kept: list[int], tmp_path: Path
) -> None:
    path = metrics_file(tmp_path, "evaluation")
    sink = JsonLines(path)
    for step in (0, 8, 10, 14):
        sink.log(step, {"eval/accuracy": 0.5})
    sink.close()
    remove_repeated(tmp_path, Progress(step=10), lambda step: is_due)
    assert [line["step"] for line in read_lines(path)] == kept
