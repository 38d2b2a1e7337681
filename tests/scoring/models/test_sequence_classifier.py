"""Decoders and encoders that classify sequences; the definition is one plain forward of the library's own class."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from asyncrl.config.schema import OutcomeModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.registry import load_outcome_model
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import BATCHES, BOUNDS, CHATML, LLAMA3, SHAPE, byte_tokenizer, plain, save

CHAT = byte_tokenizer("<|im_start|>", "<|im_end|>", "<pad>", template=CHATML)
CHAT.pad_token = "<pad>"
PLAIN = byte_tokenizer("<pad>")
PLAIN.pad_token = "<pad>"


def load(folder, **changes):
    return load_outcome_model(OutcomeModelConfig(path=str(folder), **changes), "scoring.outcome_model")


ENDING = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", bos="<s>", template=LLAMA3)
ENDING.eos_token = "<|eot|>"


def decoder(labels, pad_token_id=258):
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=labels, pad_token_id=pad_token_id)).eval()


def encoder():
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    return BertForSequenceClassification(BertConfig(**shape, num_labels=2)).eval()


CASES = {
    "reward": (decoder(1), CHAT),
    "labels": (decoder(3), CHAT),
    "bert": (encoder(), PLAIN),
    "without padding": (decoder(1, pad_token_id=None), ENDING),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {name: save(root / name, model, tokenizer) for name, (model, tokenizer) in CASES.items()}
    return {(name, bound): load(folder, micro_tokens=bound) for name, folder in folders.items() for bound in BOUNDS}


@torch.no_grad()
def plain_score(model, tokenizer, transcript):
    problem, steps = plain(transcript)
    response = "\n".join(steps)
    text = f"{problem}\n{response}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
    return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[1])


@settings(deadline=None, max_examples=30)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]), case=st.sampled_from(sorted(CASES)))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, batch, bound, case):
    expected = [plain_score(*CASES[case], transcript) for transcript in batch]
    assert models[case, bound].score(batch) == pytest.approx(expected, abs=1e-5)


def test_what_does_not_fit_is_refused(tmp_path, models):
    folder = save(tmp_path / "model", decoder(3), CHAT)
    with pytest.raises(ConfigError, match="label=3: the model has the labels 0 to 2"):
        load(folder, params={"label": 3})
    with pytest.raises(ScoringError, match="reads 512"):
        models["reward", 1].score([[Segment("x" * 600, False), Segment("y", True)]])
