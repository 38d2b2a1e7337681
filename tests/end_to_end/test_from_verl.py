"""Configurations of verl, translated and started on the demo's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.compat.verl.configuration.command import translated
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

Start = Callable[..., Run]
EXAMPLES = Path(__file__).parents[1] / "compat" / "verl" / "configuration"
STEPS = 2


@pytest.mark.parametrize(
    ("example", "tools"),
    [("gae_gsm8k.sh", []), ("multi_turn.yaml", ["actor.tools=[asyncrl.commands.demo.StepCalculator]"])],
)
def test_a_translated_configuration_trains(
    start: Start, prepared: list[str], tmp_path: Path, example: str, tools: list[str]
) -> None:
    demo = dict(word.split("=", 1) for word in prepared)
    smaller = [
        f"data.train_files={demo['data.train']}",
        f"data.val_files={demo['data.eval']}",
        f"actor_rollout_ref.model.path={demo['model.path']}",
        f"critic.model.path={demo['model.path']}",
        "data.train_batch_size=8",
        "data.max_prompt_length=192",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=0",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.logger=console",
    ]
    file = tmp_path / "mine.yaml"
    text, report = translated(EXAMPLES / example, smaller, file)
    assert not any("mended" in line for line in report), report
    file.write_text(text)
    run = start("train", f"experiment={file}", "network.replay_port=0", "network.weights_port=0", *tools)
    run.finish()
    assert [line["step"] for line in run.steps()] == list(range(STEPS))
