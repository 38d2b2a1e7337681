"""Warm start, step scorer and their preparation, in a few steps each."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config.schema import ScoringModelConfig
from asyncrl.data.reading import read_tasks
from asyncrl.demo import step_scorer, warm_start
from asyncrl.demo.arithmetic import random_expression
from asyncrl.demo.batches import batch
from asyncrl.demo.prepare import HELD_OUT_TASKS, TRAINING_TASKS, prepare
from asyncrl.demo.tokenizer import build_tokenizer
from asyncrl.demo.transcripts import demonstration
from asyncrl.scoring.models.registry import load_prm


def load(folder):
    return load_prm(ScoringModelConfig(path=str(folder)))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of two steps, with little to judge."""
    monkeypatch.setattr(step_scorer, "HELD_OUT", 4)
    for module, name in ((warm_start, "warm_start"), (step_scorer, "train_step_scorer")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), steps=2))


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
    models = [warm_start.warm_start(tokenizer, 0, [].append, steps=4) for _ in range(2)]
    parameters = sum(parameter.numel() for parameter in models[0].parameters())
    assert 1e6 < parameters < 5e6
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    ids, mask = batch(tokenizer, [demonstration(random_expression(random.Random(1)), random.Random(1))])
    with torch.no_grad():
        logits = models[0](input_ids=ids).logits[0, :-1][mask[0, 1:]]
    assert torch.nn.functional.cross_entropy(logits, ids[0, 1:][mask[0, 1:]]) < np.log(len(tokenizer))


@pytest.mark.usefixtures("short")
def test_preparing_makes_what_a_run_needs_and_finds_it_again(tmp_path: Path) -> None:
    told: list[str] = []
    prepared = prepare(tmp_path, 0, told.append)
    train, held_out = read_tasks(prepared.train), read_tasks(prepared.held_out)
    assert (len(train), len(held_out)) == (TRAINING_TASKS, HELD_OUT_TASKS)
    assert not {task.messages[1]["content"] for task in train} & {task.messages[1]["content"] for task in held_out}
    model = AutoModelForCausalLM.from_pretrained(prepared.model)
    assert model.config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(prepared.model).chat_template
    assert load(prepared.step_scorer).name.startswith("step_scorer@")
    told.clear()
    assert prepare(tmp_path, 0, told.append) == prepared
    assert told == []


@pytest.mark.usefixtures("short")
def test_a_preparation_that_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(step_scorer, "save_step_scorer", cut)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, 1, [].append)
    prepared = prepare(tmp_path, 1, [].append)
    assert load(prepared.step_scorer)
