"""A Mistral causal model that says '+' or '-' behind each marker; the definition is the model card's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.scoring.models.math_shepherd import Params, reading
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import (
    BATCHES,
    BOUNDS,
    SHAPE,
    assert_plain,
    by_bound,
    byte_tokenizer,
    load,
    plain,
    save,
)

TOKENIZER = byte_tokenizer("ки", bos="<s>", add_bos=True)
GOOD, BAD, MARKER = (TOKENIZER.encode(text)[-1] for text in ("+", "-", "ки"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=40)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    return save(tmp_path_factory.mktemp("models") / "shepherd", model, TOKENIZER)


@pytest.fixture(scope="module")
def models(folder):
    return by_bound(folder, "math_shepherd")


@pytest.fixture(scope="module")
def plain_logits(model):
    @torch.no_grad()
    def logits(transcript):
        problem, steps = plain(transcript)
        ids = torch.tensor([TOKENIZER.encode(f"{problem} " + "\n".join(f"{step} ки" for step in steps))])
        probability = model(ids).logits[0][:, [GOOD, BAD]].softmax(-1)[ids[0] == MARKER]
        return probability[:, 0].log() - probability[:, 1].log()

    return logits


@settings(deadline=None, max_examples=25)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, plain_logits, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


def test_a_marker_that_the_policy_writes_is_not_read_and_stays_its_letters(models, model):
    (scores,) = models[1].score([[Segment("q", False), Segment("a ки a", True), Segment("b", True)]])
    ids = [*TOKENIZER.encode("q a "), *TOKENIZER.encode("к")[1:], *TOKENIZER.encode("и")[1:]]
    ids += TOKENIZER.encode(" a ки\nb ки")[1:]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0][[i for i, token in enumerate(ids) if token == MARKER]]
    assert (logits[:, GOOD] - logits[:, BAD]).tolist() == pytest.approx(scores.logit.tolist(), abs=1e-4)


def test_a_tokenizer_that_does_not_tell_where_its_tokens_stand_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match=r"Slow does not tell .*; add the tokenizer\.json"):
        reading(Slow(), Params(), "scoring.prm")


def test_a_tokenizer_without_the_marker_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"params\.marker=ки: the model's tokenizer has no token"):
        load(save(tmp_path / "other", model, byte_tokenizer(bos="<s>")), "math_shepherd")
