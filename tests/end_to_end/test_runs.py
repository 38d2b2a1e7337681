"""Whole runs: chance teaches nothing, and stops and kills lose nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.commands.demo.step_scorer import JUDGEMENTS_FILE
from asyncrl.commands.demo.summary import audit
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.data.command import convert
from asyncrl.replay.stored import StoredRun
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run, read_config
from tests.helpers import GENEROUS_S, status_of
from tests.learner.support import VOCABULARY, write_model
from tests.mixtures import save_mixture

pytestmark = pytest.mark.slow

Start = Callable[..., Run]
EXCERPT = Path(__file__).parents[1] / "data" / "gsm8k"


@pytest.mark.long
def test_a_policy_whose_reward_is_chance_does_not_learn(start: Start, prepared: list[str]) -> None:
    rule = "scoring.rule=tests.end_to_end.rules.by_chance"
    run = start("train", *prepared, rule, "scoring.shaping.process_weight=0", "learner.steps=8")
    run.finish()
    accuracies = run.accuracies()
    # Eight steps with the true reward end above 0.9; ties between operators alone move it by 0.3.
    assert len(accuracies) == 2
    assert max(accuracies) < 0.8, accuracies


@pytest.mark.long
def test_the_step_scorer_judges_more_than_nine_of_ten_steps_that_it_never_saw(prepared: list[str]) -> None:
    folder = dict(each.split("=", 1) for each in prepared)["scoring.prm.path"]
    judgements = json.loads((Path(folder) / JUDGEMENTS_FILE).read_text())
    assert set(judgements) == {"generated", "GSM8K"}
    for judged in judgements.values():
        assert judged["accuracy"] > max(0.9, judged["right"])


@pytest.mark.long
def test_a_stop_is_clean_and_the_same_command_resumes(start: Start, prepared: list[str]) -> None:
    changes = (*prepared, "learner.steps=8", "learner.checkpoint_every=2", "learner.eval_every=0")
    first = start("train", *changes)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(GENEROUS_S) == 130, first.output
    assert "resume" in first.output
    other = start("train", *changes, "run.seed=1")
    assert other.process.wait(GENEROUS_S) == 2
    assert "run.seed=1: it was" in other.output
    second = start("train", *changes)
    second.finish()
    assert [line["step"] for line in second.steps()] == list(range(8)), "a step that was trained again has one line"
    config = read_config(second.dir)
    assert config.network.replay_port > 0, "the run's folder must tell where its replay listens"
    assert audit(second.dir, config.replay.sampler.max_times_sampled) == {"lost": 0, "trained_twice": 0}
    summary = json.loads((second.dir / SUMMARY_FILE).read_text())
    assert (summary["steps"], summary["trajectories"]["trained"]) == (8, 8 * 64), "of both parts of the run"
    assert 0 <= summary["speed"]["waited_for_labels"] < summary["speed"]["learner_idle"] + 1


def test_a_wrong_configuration_ends_with_a_message_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = ("actor.tools=[abacus]", "scoring.rule=guess")
    assert status_of("train", f"run.dir={tmp_path}", "run.name=run", *World.make(tmp_path).overrides(1), *wrong) == 2
    said = capfd.readouterr().err
    for fix in ("there is no tool 'abacus'; use one of", "scoring.rule=guess: use one of"):
        assert fix in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_killing_every_role_once_loses_nothing_and_accuracy_is_reached(start: Start, prepared: list[str]) -> None:
    run = start("demo", "--json", "learner.steps=24", "learner.eval_every=12", "learner.checkpoint_every=3")
    for step, role in ((2, "actor-0"), (4, "replay"), (6, "scoring-0"), (8, "learner")):
        run.wait_for_step(step)
        run.kill(role)
    summary = run.finish()
    assert (summary["lost"], summary["trained_twice"]) == (0, 0), run.logs()
    assert summary["speed"]["max_lag"] <= 2
    assert summary["held_out"]["accuracy"]["first"] < 0.6
    assert summary["held_out"]["accuracy"]["last"] >= 0.9
    assert summary["trajectories"]["trained"] == summary["steps"] * 64
    assert "Four things to try next" in run.output


@pytest.mark.long
def test_a_mixture_trains_with_the_experts_that_its_engine_used(start: Start, tmp_path: Path) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet", "train")
    model = save_mixture(tmp_path / "model", "qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=8192)
    build_tokenizer().save_pretrained(model)
    run = start(
        "train",
        *("experiment=gsm8k_calculator", f"model.path={model}", "model.dtype=float32"),
        *(f"data.train={tmp_path / 'gsm8k.parquet'}", "actor.max_turn_tokens=24", "replay.max_lag=0"),
        *("learner.batch_size=8", "learner.group_size=4", "learner.steps=2"),
        *("engine.return_routed_experts=true", "learner.router_replay=true", "replay.retention=all"),
    )
    run.finish()
    for row in run.steps():
        assert row["routing/replayed"] > 0.9
        # The same weights in the same precision choose the same experts but at near ties.
        assert row["routing/changed"] < 0.01
        assert row["routing/refused"] == 0
    stored = StoredRun(run.dir / "replay")
    for each in stored.plan(0).ids:
        trajectory = stored.trajectory(each)
        assert trajectory.routed_experts.shape == (len(trajectory), 2 * 2)
        assert (trajectory.routed_experts < 4).all(1)[trajectory.loss_mask].mean() > 0.9
    stored.close()


@pytest.mark.long
def test_epochs_of_files_of_several_kinds_without_long_prompts_resume_with_the_same_tasks(
    start: Start, tmp_path: Path
) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "a.parquet", "train")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()[:20]
    again = [{**row, "extra_info": {**row["extra_info"], "split": "again"}} for row in rows]
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in again))
    words = (
        *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
        *(
            f"data.train=[{tmp_path}/a.parquet,{tmp_path}/b.*]",
            "data.max_prompt_length=433",
            "data.filter_overlong=true",
        ),
        *("learner.batch_size=8", "learner.group_size=4", "learner.steps=null", "replay.shards=2"),
        *("actor.max_turn_tokens=8", "learner.checkpoint_every=1"),
    )
    run = start("train", *words, "learner.epochs=0.1")
    run.finish()
    steps = len(run.steps())
    run = start("train", *words, "learner.epochs=0.2")
    run.finish()
    assert 0 < steps < len(run.steps())
    assert "data.filter_overlong leaves out" in run.output


@pytest.mark.long
def test_a_resume_with_other_tasks_is_refused_once_and_one_with_the_same_takes_a_port_that_is_free(
    start: Start, tmp_path: Path
) -> None:
    """Each replay would refuse the store, and be started again, eight times a minute."""
    tasks = tmp_path / "tasks.parquet"
    convert("gsm8k", str(EXCERPT), tasks, "train")
    words = (
        *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
        *("actor.max_turn_tokens=8", "learner.batch_size=8", "learner.group_size=4", "learner.export=false"),
        f"data.train={tasks}",
    )
    start("train", *words, "learner.steps=1").finish()
    begun, whole = tasks.read_bytes(), pq.read_table(tasks)
    for table in (whole.slice(0, whole.num_rows - 1), whole.take(list(reversed(range(whole.num_rows))))):
        pq.write_table(table, tasks)
        run = start("train", *words, "learner.steps=2")
        assert run.process.wait(GENEROUS_S) == 2, run.output
        assert run.output.count(f"{tasks} has changed since the run began") == 1, run.output
        assert "restore the file" in run.output
        assert read_config(run.dir).learner.steps == 1, "the run keeps its configuration"
    tasks.write_bytes(begun)
    # Somebody else has taken the port that the run had chosen.
    port = read_config(run.dir).network.replay_port
    with socket.create_server(("127.0.0.1", port)):
        command = [sys.executable, "-m", "asyncrl", "resume", str(run.dir), "learner.steps=2"]
        resumed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=GENEROUS_S)
    assert resumed.returncode == 0, resumed.stderr
    assert read_config(run.dir).network.replay_port != port
    assert [line["step"] for line in run.steps()] == [0, 1]


@pytest.mark.long
def test_kills_train_no_demonstration_of_a_group_twice_and_the_model_is_exported(start: Start, tmp_path: Path) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "tasks.parquet", "train")
    rows = pq.read_table(tmp_path / "tasks.parquet").to_pylist()
    shown = [f"The answer is #### {row['reward_model']['ground_truth']}" for row in rows]
    shown[1::2] = [None] * len(shown[1::2])
    table = pq.read_table(tmp_path / "tasks.parquet").append_column("target", pa.array(shown, pa.string()))
    pq.write_table(table, tmp_path / "tasks.parquet")
    words = (
        *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
        *(f"data.train={tmp_path / 'tasks.parquet'}", "data.demonstration=target", "actor.max_turn_tokens=24"),
        *("algorithm.demonstration.weight=shaped", "replay.retention=all", "learner.checkpoint_every=3"),
        *("learner.batch_size=16", "learner.group_size=4", "learner.steps=9", "replay.lease_s=5"),
    )
    run = start("train", *words)
    for step, role in ((1, "actor-0"), (3, "replay"), (4, "learner"), (6, "scoring-0")):
        run.wait_for_step(step)
        run.kill(role)
    run.finish()
    assert (run.dir / "model" / "model.safetensors").exists()
    found = audit(run.dir, read_config(run.dir).replay.sampler.max_times_sampled)
    assert (found["lost"], found["trained_twice"]) == (0, 0), run.logs()
    # A step that was trained twice, since no checkpoint had it, is logged twice: with the same demonstrations.
    by_step = {row["step"]: row for row in run.steps()}
    stored = StoredRun(run.dir / "replay")
    plans = [stored.plan(step) for step in range(9)]
    demonstrations = [plan.ids[index] for plan in plans for index in plan.demonstrations]
    assert demonstrations
    assert len(set(demonstrations)) == len(demonstrations)
    for step, plan in enumerate(plans):
        assert len(plan.ids) == 16 + len(plan.demonstrations)
        if plan.demonstrations:
            assert by_step[step]["demonstration/episodes"] == len(plan.demonstrations)
            assert by_step[step]["demonstration/reward"] > by_step[step]["reward/mean"]
        for index in plan.demonstrations:
            assert stored.trajectory(plan.ids[index]).is_demonstration
    stored.close()
