"""The published layout: v_head.summary beside a causal model; the definition is the authors' prepare_input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.scoring.models.skywork_prm import encode
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import (
    BATCHES,
    BOUNDS,
    HIDDEN,
    SHAPE,
    assert_plain,
    by_bound,
    byte_tokenizer,
    load,
    plain,
    save,
)

TOKENIZER = byte_tokenizer(bos="<s>")
NEWLINE = TOKENIZER.encode("\n")[-1]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(1)
    return {"v_head.summary.weight": torch.randn(1, HIDDEN), "v_head.summary.bias": torch.randn(1)}


@pytest.fixture(scope="module")
def models(tmp_path_factory, model, head):
    folder = tmp_path_factory.mktemp("models") / "skywork"
    return by_bound(save(folder, model, TOKENIZER, **head), "skywork_prm")


@pytest.fixture(scope="module")
def plain_logits(model, head):
    @torch.no_grad()
    def logits(transcript):
        problem, steps = plain(transcript)
        ids, flags = TOKENIZER.encode("<s>" + problem + "\n"), []
        for step in steps:
            for line in step.split("\n"):
                ids += [*TOKENIZER.encode(line), NEWLINE]
            flags.append(len(ids) - 1)
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        return hidden[flags] @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]

    return logits


@settings(deadline=None, max_examples=25)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, plain_logits, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


class Merging:
    """A tokenizer that joins a newline with what stands before it."""

    bos_token_id = 0

    def encode(self, text, **_):
        return [ord(letter) for letter in text.replace(".\n", "¶").replace("\n\n", "§")]


def test_a_step_of_several_lines_is_the_lines_that_the_recipe_makes_and_read_at_its_last():
    encoded = encode([Segment("q", False), Segment("a.\n\nb\n", True), Segment("c", True)], Merging(), "\n", 10)
    assert "".join(map(chr, encoded.ids)) == "\0q\na.\n\nb\nc\n"
    assert encoded.reads == [[8], [10]]


def test_weights_stored_by_torch_are_read_too(tmp_path, model, head, models):
    folder = save(tmp_path / "skywork", model, TOKENIZER)
    (folder / "model.safetensors").unlink()
    torch.save({**model.state_dict(), **head}, folder / "pytorch_model.bin")
    transcript = [Segment("q", False), Segment("a", True), Segment("b", True)]
    (stored,), (safe,) = load(folder, "skywork_prm").score([transcript]), models[1].score([transcript])
    assert abs(stored.logit - safe.logit).max() < 1e-6


def test_a_causal_model_without_a_value_head_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"v_head\.summary\.weight must be \(1, 32\), and its weights hold nothing"):
        load(save(tmp_path / "bare", model, TOKENIZER), "skywork_prm")
