"""Warm start, step scorer and their preparation, in a few steps each."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.commands.demo.arithmetic import random_expression
from asyncrl.commands.demo.prepare import HELD_OUT_TASKS, TRAINING_TASKS, Effort, prepare_demo
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.commands.demo.transcripts import batch, demonstration
from asyncrl.commands.demo.warm_start import warm_start
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.data.reading import TaskFile
from asyncrl.scoring.models.registry import load_prm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_the_mask_is_true_exactly_on_what_the_assistant_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    transcripts = [demonstration(random_expression(rng), rng) for _ in range(4)]
    ids, mask = batch(tokenizer, transcripts)
    for row, chosen, messages in zip(ids, mask, transcripts, strict=True):
        *calls, final = [message for message in messages if message["role"] == "assistant"]
        text = tokenizer.decode(row[chosen])
        assert text.count("<tool_call>") == text.count("<|im_end|>") - 1 == len(calls)
        assert text.endswith(f"</tool_call><|im_end|>{final['content']}<|im_end|>")
        assert "<|im_start|>" not in text
        assert "<tool_response>" not in text


def test_a_warm_start_learns_and_repeats_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    models = [warm_start(tokenizer, 0, [].append, steps=2) for _ in range(2)]
    parameters = sum(parameter.numel() for parameter in models[0].parameters())
    assert 1e6 < parameters < 5e6
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    ids, mask = batch(tokenizer, [demonstration(random_expression(random.Random(1)), random.Random(1))])
    with torch.no_grad():
        logits = models[0](input_ids=ids).logits[0, :-1][mask[0, 1:]]
    assert torch.nn.functional.cross_entropy(logits, ids[0, 1:][mask[0, 1:]]) < np.log(len(tokenizer))


def test_preparing_makes_what_a_run_needs_starts_again_if_it_was_killed_and_finds_it_later(tmp_path: Path) -> None:
    lines: list[str] = []

    def kill(line: str) -> None:
        if "is right on" in line:
            raise KeyboardInterrupt

    effort = Effort(warm_start=2, step_scorer=2, judged=4)
    with pytest.raises(KeyboardInterrupt):
        prepare_demo(tmp_path, 0, kill, effort)
    prepared = prepare_demo(tmp_path, 0, lines.append, effort)
    train, held_out = TaskFile(prepared.train), TaskFile(prepared.held_out)
    assert (len(train), len(held_out)) == (TRAINING_TASKS, HELD_OUT_TASKS)
    assert not {task.messages[1]["content"] for task in train} & {task.messages[1]["content"] for task in held_out}
    model = AutoModelForCausalLM.from_pretrained(prepared.model)
    assert model.config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(prepared.model).chat_template
    scorer = load_prm(ScoringModelConfig(path=str(prepared.step_scorer)))
    assert scorer.name.startswith("step_scorer@")
    lines.clear()
    assert prepare_demo(tmp_path, 0, lines.append, effort) == prepared
    assert lines == []
