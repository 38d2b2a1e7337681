"""benchmarks.versus_verl: the figures of both sides, and the settings of verl."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import yaml
from torch.testing import assert_close

from asyncrl.scoring.rules.exact_number import exact_number
from asyncrl.scoring.rules.gsm8k import gsm8k
from asyncrl.types import Task, Trajectory
from benchmarks import versus_verl
from benchmarks.verl_attention import flash_attn_func, flash_attn_varlen_func
from benchmarks.verl_log import Console, row_of
from benchmarks.verl_settings import PARTS, RULES, asyncrl_settings, verl_settings, words, write_parts
from benchmarks.versus_verl import (
    AsyncrlRun,
    Curve,
    Evaluation,
    Step,
    Use,
    VerlRun,
    command_line,
    command_of,
    curve_of,
    environment_of,
    figures,
    label_of,
    played,
    work_of,
    written,
)
from tests.runs.support import write_run

RAY = "(TaskRunnerV1 pid=4711) "
ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
VERL_NAMES = {
    "verl.experimental.agent_loop.agent_loop": ["AgentLoopOutput"],
    "verl.experimental.agent_loop.tool_agent_loop": ["AgentData", "AgentState", "ToolAgentLoop"],
    "verl.tools.base_tool": ["BaseTool"],
    "verl.tools.schemas": ["ToolResponse"],
    "verl.trainer.ppo.v1.replay_buffer": ["ReplayBuffer", "ReplayBufferAsync"],
}
"""The names that PARTS imports from verl, by their modules."""
GIVEN = ("--model", "m", "--train", "t", "--held-out", "h", "--side", "verl-sync")


def step_line(step: int, seconds: float) -> str:
    """A line of verl's synchronous trainer, whose values are numbers of Python and of numpy."""
    return (
        f"{RAY}step:{step} - training/global_step:{step} - critic/score/mean:np.float64(0.125) - actor/lr:2e-05 - "
        f"actor/grad_norm:nan - timing_s/gen:{seconds - 1.5} - timing_s/update_actor:1.0 - "
        f"timing_s/update_weights:0.25 - timing_s/step:{seconds}\n"
    )


def test_a_line_of_metrics_becomes_a_row_and_other_lines_do_not() -> None:
    row = row_of(step_line(3, 4.0), 12.5)
    assert row is not None
    assert (row.time, row.step, row.values["critic/score/mean"], row.values["actor/lr"]) == (12.5, 3, 0.125, 2e-5)
    assert row.seconds == {"gen": 2.5, "update_actor": 1.0, "update_weights": 0.25, "step": 4.0}
    assert row.accuracy is None
    assert row_of(f"{RAY}Training Progress:   1%| 3/1000000 [00:12<00:00]", 1.0) is None


def test_an_evaluation_is_read_with_the_colon_of_its_data_source() -> None:
    row = row_of(f"{RAY}step:0 - val-aux/num_turns/mean:4.5 - {ACCURACY}:np.float64(0.0561)", 1.0)
    assert row is not None
    assert (row.accuracy, row.seconds) == (0.0561, {})


def test_lines_of_the_fully_asynchronous_trainer_without_a_step_time_are_no_steps() -> None:
    lines = (
        f"{RAY}step:1 - fully_async/rollouter/idle_ratio:0.5 - fully_async/rollouter/active_time:1.5",
        f"{RAY}step:1 - timing_s/gen:1.0 - timing_s/timing_s/param_sync:0.5 - timing_s/step:2.0",
    )
    found = [row_of(line, float(number)) for number, line in enumerate(lines)]
    curve = curve_of([row for row in found if row is not None])
    assert curve == Curve([Step(1.0, 2.0, {"gen": 1.0, "param_sync": 0.5})], [])


def test_a_console_is_read_line_by_line_while_it_grows(tmp_path: Path) -> None:
    log, now = tmp_path / "verl.log", [10.0]
    console = Console(log, lambda: now[0])
    console.read()
    whole = step_line(1, 4.0)
    log.write_text(whole + whole[:40])
    console.read()
    console.read()
    now[0] = 14.0
    log.write_text(whole + step_line(2, 3.0))
    console.read()
    assert [(row.time, row.step) for row in console.rows] == [(10.0, 1), (14.0, 2)]


def test_both_sides_have_the_same_figures_for_the_same_steps(tmp_path: Path) -> None:
    run = AsyncrlRun(write_run(tmp_path / "a", [0.1, 0.3, 0.5])).curve()
    assert [(step.time, step.seconds, step.phases) for step in run.steps] == [
        (at, 2.0, {"wait": 0.5, "train": 1.5}) for at in (102.0, 104.0, 106.0)
    ]
    lines = [f"step:{n} - timing_s/wait:0.5 - timing_s/train:1.5 - timing_s/step:2.0" for n in (1, 2, 3)]
    rows = [row_of(line, 100.0 + 2 * number) for number, line in enumerate(lines, 1)]
    verl = curve_of([row for row in rows if row is not None])
    use = Use([(103.0, [1.0, 0.0]), (105.0, [0.5, 0.25]), (106.0, [0.7, 0.75])])
    for curve in (run, Curve(verl.steps, run.evaluations)):
        found = figures(curve, use, 8, launched=90.0)
        assert found["samples_per_s"] == found["samples_per_s_with_evaluations"] == 4.0
        assert found["seconds_of_phases"] == {"wait": 0.5, "train": 1.5}
        assert found["gpu_utilisation"] == [0.6, 0.5]
        assert found["seconds_before_the_first_step"] == 10.0
        assert [point["accuracy"] for point in found["accuracy"]] == [0.25, 0.75]


def test_evaluations_between_steps_are_in_one_of_the_two_rates_only() -> None:
    steps = [Step(at, 2.0, {}) for at in (2.0, 4.0, 6.0, 12.0)]
    found = figures(Curve(steps, [Evaluation(10.0, 3, 0.5)]), Use(), 8, launched=0.0)
    assert (found["samples_per_s"], found["samples_per_s_with_evaluations"]) == (4.0, 2.0)
    assert found["accuracy"] == [{"seconds": 10.0, "step": 3, "accuracy": 0.5}]


def test_too_few_steps_give_no_figures() -> None:
    with pytest.raises(ValueError, match="has done 2 steps, and needs 3"):
        figures(Curve([Step(1.0, 1.0, {})] * 2, []), Use(), 8, launched=0.0)


def test_verl_gets_the_same_work_on_every_side(tmp_path: Path) -> None:
    work = work_of(command_line().parse_args([*GIVEN, "--rule", "exact_number"]))
    write_parts(tmp_path, work)
    tool = yaml.safe_load((tmp_path / "tools.yaml").read_text())["tools"][0]
    assert tool["class_name"] == "benchmarks.verl_grpo.Calculator"
    assert tool["tool_schema"]["function"]["name"] == "calculator"
    (loop,) = yaml.safe_load((tmp_path / "loops.yaml").read_text())
    assert (loop["turn_tokens"], loop["episode_tokens"]) == (128, 1024)
    ours = asyncrl_settings("asyncrl-servers", work, tmp_path, "python")
    for side in ("verl-sync", "verl-ahead", "verl-async"):
        theirs = verl_settings(side, work, tmp_path)
        groups = theirs["actor_rollout_ref.actor.ppo_mini_batch_size"]
        assert groups * theirs["actor_rollout_ref.rollout.n"] == ours["learner.batch_size"]
        assert theirs["actor_rollout_ref.actor.optim.lr"] == ours["learner.lr"]
        assert theirs["trainer.n_gpus_per_node"] + theirs.get("rollout.n_gpus_per_node", 0) == work.gpus
        assert theirs["+actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type"] == "reinforce"
        assert theirs["reward.custom_reward_function.name"] == ours["scoring.rule"] == "exact_number"
        assert all("=" in word for word in words(theirs))


@pytest.mark.parametrize("rule", RULES)
def test_verl_scores_an_answer_as_asyncrl_does(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in VERL_NAMES.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**dict.fromkeys(names, object)))
    theirs = runpy.run_module(PARTS)[rule]
    ours = {"gsm8k": gsm8k, "exact_number": exact_number}[rule]
    trajectory = cast(Trajectory, None)
    task = Task(id="t", messages=[{"role": "user", "content": "2 ** 10"}], ground_truth="1,024", data_source="d")
    for answer in ("#### 1024", "<answer>1024</answer>", "1024 is it, or 5", "so it is 1024.0", "#### 7", "none", ""):
        solution = f"assistant\n#### 1024\nuser\nmore\nassistant\n{answer}"
        found = theirs(solution_str=solution, ground_truth=task.ground_truth, data_source="d")
        assert found == ours(task, answer, trajectory), answer


def test_the_side_decides_which_program_runs(tmp_path: Path) -> None:
    given = ["--model", "m", "--train", "t", "--held-out", "h", "--python", "P", "--set", "a=1", "--side"]
    commands = {}
    for side in ("verl-sync", "verl-async", "asyncrl-embedded"):
        options = command_line().parse_args([*given, side])
        commands[side] = command_of(options, work_of(options), tmp_path / side)
    assert commands["verl-sync"][:4] == ["P", "-u", "-m", "verl.trainer.main_ppo"]
    assert commands["verl-async"][3].endswith("fully_async_main")
    assert commands["asyncrl-embedded"][2:4] == ["asyncrl", "train"]
    assert all(command[-1] == "a=1" for command in commands.values())
    assert (label_of("verl-sync", 4), label_of("verl-async", 1)) == ("verl-sync", "verl-async-lag1")


def test_a_result_keeps_the_other_sides(tmp_path: Path) -> None:
    file = tmp_path / "versus_verl.json"
    written(file, "verl-sync", {"samples_per_s": 1.0}, "a machine")
    written(file, "asyncrl-servers-lag4", {"samples_per_s": 2.0}, "a machine")
    written(file, "verl-sync", {"samples_per_s": 3.0}, "a machine")
    assert json.loads(file.read_text())["result"] == {
        "verl-sync": {"samples_per_s": 3.0},
        "asyncrl-servers-lag4": {"samples_per_s": 2.0},
    }


def test_a_python_of_verl_without_flash_attn_gets_a_stand_in(tmp_path: Path) -> None:
    assert "stand_in" not in environment_of("asyncrl-servers", tmp_path, has_attention=False)["PYTHONPATH"]
    assert "stand_in" not in environment_of("verl-sync", tmp_path, has_attention=True)["PYTHONPATH"]
    assert str(tmp_path / "stand_in") in environment_of("verl-sync", tmp_path, has_attention=False)["PYTHONPATH"]
    (found,) = distributions(path=[str(tmp_path / "stand_in")])
    assert (found.metadata["Name"], found.version, found.read_text("top_level.txt")) == (
        "flash_attn",
        "2.8.3",
        "flash_attn\n",
    )


def test_the_stand_in_attends_as_the_plain_formula() -> None:
    query, key, value = (torch.randn(2, 5, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    wide = (each.repeat_interleave(2, 2) for each in (key, value))
    q, k, v = (each.transpose(1, 2) for each in (query, *wide))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    assert_close(flash_attn_func(query, key, value, causal=True), (scores.softmax(-1) @ v).transpose(1, 2))


def test_packed_sequences_reach_the_kernel_of_pytorch() -> None:
    # There is no such kernel for the CPU, so this checks shapes and the gradient's path only.
    query, key = (torch.empty(10, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (9, 3))
    ends = torch.empty(3, dtype=torch.int64, device="meta")
    output = flash_attn_varlen_func(query.requires_grad_(), key, key, ends, ends, 6, 6, causal=True)
    assert output.shape == query.shape
    assert output.grad_fn is not None


@pytest.mark.slow
def test_the_command_runs_a_side_and_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()

    def used(index: int) -> SimpleNamespace:
        read.add(index)
        return SimpleNamespace(gpu=50)

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=used,
        nvmlDeviceGetName=lambda index: "a GPU",
    )
    monkeypatch.setattr(versus_verl, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    lines = "".join(step_line(step, 2.0) for step in (1, 2, 3))
    python = tmp_path / "python"
    # It answers for its packages as Python does, and plays verl otherwise.
    python.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"if sys.argv[1] == '-c': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        f"print('packages:', os.environ['PYTHONPATH'])\nprint({lines!r}, flush=True)\ntime.sleep(600)\n"
    )
    python.chmod(0o755)
    folders = ["--dir", str(tmp_path / "runs"), "--out", str(tmp_path)]
    versus_verl.main([*GIVEN, *folders, "--python", str(python), "--seconds", "0.1", "--start-seconds", "300"])
    record = json.loads((tmp_path / "versus_verl.json").read_text())
    row = record["result"]["verl-sync"]
    assert record["machine"].startswith("2 x a GPU, ")
    assert (row["steps"], row["samples_per_s"], row["versions"]["torch"]) == (
        1,
        128.0,
        torch.__version__.partition("+")[0],
    )
    assert read == {2, 3}
    assert row["command"][0] == str(python)
    assert "stand_in" in (tmp_path / "runs/verl-sync.log").read_text()


@pytest.mark.slow
def test_a_run_is_ended_some_time_after_its_first_step(tmp_path: Path) -> None:
    log, looks = tmp_path / "verl.log", []
    lines = "".join(step_line(step, 2.0) for step in (1, 2, 3))
    program = f"import time\nprint({lines!r}, flush=True)\ntime.sleep(600)"
    options = command_line().parse_args([*GIVEN, "--seconds", "0.1", "--start-seconds", "300"])
    curve = played([sys.executable, "-c", program], log, {}, VerlRun(log), options, lambda: looks.append(1))
    assert [step.seconds for step in curve.steps] == [2.0, 2.0, 2.0]
    assert looks


@pytest.mark.slow
def test_a_run_without_a_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    options = command_line().parse_args([*GIVEN, "--start-seconds", "300"])
    with pytest.raises(SystemExit, match=r"no step was trained within 300 s; the end of .*verl\.log:\n.*no GPU here"):
        played([sys.executable, "-c", "print('no GPU here')"], log, {}, VerlRun(log), options, lambda: None)
