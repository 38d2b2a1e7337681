"""A Llama causal model that answers each step with '+' or '-'; the definition is the authors' evaluation script."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from tests.scoring.models.support import (
    BATCHES,
    BOUNDS,
    LLAMA3,
    SHAPE,
    assert_plain,
    by_bound,
    byte_tokenizer,
    load,
    plain,
    save,
)

TOKENIZER = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", bos="<s>", add_bos=True, template=LLAMA3)
GOOD, BAD = (TOKENIZER.encode(text)[-1] for text in "+-")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory, model):
    return by_bound(save(tmp_path_factory.mktemp("models") / "rlhflow", model, TOKENIZER), "rlhflow")


@pytest.fixture(scope="module")
def plain_logits(model):
    """Step by step: the conversation so far, read two tokens before its end, where the answer is foretold."""

    @torch.no_grad()
    def logits(transcript):
        problem, steps = plain(transcript)
        conversation, found = [], []
        for index, step in enumerate(steps):
            text = step if index else f"{problem} {step}"
            conversation += [{"role": "user", "content": text}, {"role": "assistant", "content": "+"}]
            ids = TOKENIZER.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
            probability = model(ids).logits[0, -3, [GOOD, BAD]].softmax(-1)
            found.append(probability[0].log() - probability[1].log())
        return torch.stack(found)

    return logits


@settings(deadline=None, max_examples=20)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, plain_logits, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


def test_a_model_without_a_chat_template_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="no chat template, which this family needs"):
        load(save(tmp_path / "bare", model, byte_tokenizer(bos="<s>")), "rlhflow")
