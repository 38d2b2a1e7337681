"""Runs of verl's process-reward managers, translated, with tiny random models."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrl.compat.verl import from_trajectories, load_reward_manager
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.lines import read_lines
from asyncrl.types import Task, Trajectory
from tests.end_to_end.support import Run
from tests.learner.support import write_model
from tests.scoring.models.families import FAMILIES

pytestmark = pytest.mark.long

Start = Callable[..., Run]
STEPS = 2


def even(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A verdict that a policy without any training passes now and then."""
    return float(len(answer) % 2 == 0)


def compute_even(solution_str: str, **_: Any) -> float:
    """The same as a reward function of verl."""
    return float(len(solution_str) % 2 == 0)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen_prm", {"prm_aggregation": "raw", "enable_anti_hack": False}),
        ("qwen_prm", {"prm_aggregation": "mean_response", "use_logit_tanh": True, "prm_acc_bonus_weight": 0.5}),
        ("skywork_prm", {"prm_aggregation": "best_of_n", "incorrect_answer_penalty": -0.25}),
    ],
)
def test_the_manager_in_a_program_gives_the_rewards_that_its_run_trained_on(
    start: Start, tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    model, prm = write_model(tmp_path / "model"), FAMILIES[family](tmp_path).folder
    keys = {**keys, "prm_model_path": str(prm), "dtype": "float32", "device_map": "cpu", "length_bonus_weight": 0.0}
    run = start("train", f"experiment={_translated(tmp_path, model, family, keys)}", *LOCAL)
    run.finish()
    steps = run.steps()
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert all(line["grad_norm"] > 0 for line in steps), "the scores of steps must train"
    evaluations = read_lines(metrics_file(run.dir, "evaluation"))
    assert [line["step"] for line in evaluations] == [0, STEPS]
    assert all({f"eval/{name}" for name in TOLD} <= line.keys() for line in evaluations)
    with closing(StoredRun(run.dir / "replay")) as stored:
        records = [stored.record(name) for name in stored.ids()]
    pairs = [(each.trajectory, each.labels) for each in records if each.trajectory and each.labels]
    assert len(pairs) >= STEPS * 8
    data = from_trajectories([trajectory for trajectory, _ in pairs], pad_token_id=0)
    arrays = {"data_source": "sums", "reward_model": {"ground_truth": "3"}, "raw_prompt": PROMPT}
    for name, value in arrays.items():
        data.non_tensor_batch[name] = np.empty(len(data), dtype=object)
        for row in range(len(data)):
            data.non_tensor_batch[name][row] = value
    # In the run, the part best_of_n of the algorithm compares the members, after the labels.
    whole = "mean_response" if keys["prm_aggregation"] == "best_of_n" else keys["prm_aggregation"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    manager = load_reward_manager(family, tokenizer, 0, compute_even, **{**keys, "prm_aggregation": whole})
    found = manager(data).sum(-1).tolist()
    step_scores = [labels.step_scores.sum() if whole == "raw" else 0.0 for _, labels in pairs]
    expected = [labels.reward + score for (_, labels), score in zip(pairs, step_scores, strict=True)]
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert len({round(reward, 4) for reward in found}) > 1


PROMPT = [{"role": "user", "content": "what is 1 + 2?"}]
TOLD = ("accuracy", "reward", "process", "length", "pass@2", "best@2", "maj@2")
LOCAL = ("network.replay_port=0", "network.weights_port=0", "replay.retention=all", "learner.eval_attempts=2")


def _translated(folder: Path, model: Path, family: str, keys: dict[str, Any]) -> Path:
    """A configuration of verl for a few tasks, as an experiment file."""
    rows = [
        {"prompt": PROMPT, "data_source": "sums", "reward_model": {"ground_truth": "3"}, "extra_info": {"index": index}}
        for index in range(8)
    ]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        f"data.train_files={folder / 'tasks.jsonl'}",
        f"data.val_files={folder / 'tasks.jsonl'}",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=48",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "custom_reward_function.path=pkg://tests.end_to_end.test_process_rewards",
        "custom_reward_function.name=even",
        "trainer.n_gpus_per_node=0",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.logger=console",
        f"reward_model.reward_manager={family}",
        *(
            f"reward_model.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in keys.items()
        ),
    ]
    file = folder / "mine.yaml"
    text, report = translated(None, words, file)
    assert not any("mended" in line for line in report), report
    file.write_text(text)
    return file
