"""Two causal models; the definition sums log-ratios over each step's own tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import (
    BATCHES,
    BOUNDS,
    SHAPE,
    assert_plain,
    by_bound,
    byte_tokenizer,
    load,
    save,
)

TOKENIZER = byte_tokenizer("<|im_start|>", "<|im_end|>")
BETA = 0.3


def make(seed):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save(folder / name, make(seed), TOKENIZER) for seed, name in enumerate(("phi", "reference"))]


@pytest.fixture(scope="module")
def models(pair):
    return by_bound(pair[0], "prime", params={"reference": str(pair[1]), "beta": BETA})


@torch.no_grad()
def plain_logits(transcript):
    ids, owner = [], []
    for index, segment in enumerate(transcript):
        tokens = TOKENIZER.encode(segment.text)
        ids += tokens
        owner += [index if segment.is_step else -1] * len(tokens)
    tokens = torch.tensor([ids])
    phi, reference = (make(seed)(tokens).logits[0].log_softmax(-1) for seed in (0, 1))
    ratio = [0.0, *(float(phi[t - 1, ids[t]] - reference[t - 1, ids[t]]) for t in range(1, len(ids)))]
    steps = [index for index, segment in enumerate(transcript) if segment.is_step]
    return np.array([BETA * sum(r for r, o in zip(ratio, owner, strict=True) if o == step) for step in steps])


@settings(deadline=None, max_examples=20)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


def test_whoever_trains_phi_changes_its_weights_and_the_name(pair):
    model = load(pair[0], "prime", params={"reference": str(pair[1]), "beta": BETA})
    transcript = [Segment("q", False), Segment("abc", True)]
    (before,) = model.score([transcript])
    model.phi.backbone.load_state_dict(make(1).base_model.state_dict())
    (after,) = model.score([transcript])
    assert abs(before.logit[0] - after.logit[0]) > 1e-3
    model.name = "phi@7"


def test_a_model_that_is_its_own_reference_finds_nothing_to_reward(pair):
    model = load(pair[0], "prime", params={"reference": str(pair[0])})
    (scores,) = model.score([[Segment("q", False), Segment("abc", True)]])
    assert scores.logit.tolist() == [0.0]
    assert scores.probability.tolist() == [0.5]


def test_what_cannot_be_compared_is_refused(pair, tmp_path):
    with pytest.raises(ConfigError, match="reference must be set"):
        load(pair[0], "prime")
    other = save(tmp_path / "other", make(0), byte_tokenizer())
    with pytest.raises(ConfigError, match="have different tokenizers"):
        load(pair[0], "prime", params={"reference": str(other)})
    with pytest.raises(ScoringError, match="begins with a step"):
        load(pair[0], "prime", params={"reference": str(pair[1])}).score([[Segment("a", True)]])
