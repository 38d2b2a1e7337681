"""Tiny models of many architectures: every function on architectures agrees with the model's own forward pass."""

import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Phi3Config,
    Phi3Model,
)

from asyncrl.config.schema import OutcomeModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.causal import CausalReader, linear
from asyncrl.scoring.models.checkpoint import is_causal, logits_are_the_heads
from asyncrl.scoring.models.encoding import Encoded, longest_input
from asyncrl.scoring.models.registry import load_outcome_model
from asyncrl.scoring.models.sequence_classifier import classifies_padded
from asyncrl.scoring.transcript import Passage
from tests.scoring.models.support import HIDDEN, SHAPE, VOCABULARY, byte_tokenizer, load, save

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 66, "initializer_range": 0.3}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
PHI = {
    **{**SHAPE, "num_key_value_heads": 2},
    "original_max_position_embeddings": 16,
    "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16},
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
GEMMA = {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "pad_token_id": 0}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

SHARED = {
    "bert": ENCODER,
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta": {**ENCODER, "pad_token_id": 1},
    "xlm-roberta": {**ENCODER, "pad_token_id": 1},
    "electra": {**ENCODER, "embedding_size": 32},
    "albert": {**ENCODER, "embedding_size": 32},
    "deberta-v2": {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {**ENCODER, **SPECIAL},
    "gpt2": GPT,
    "gpt_neox": ENCODER,
    "opt": {**SMALL, "ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3},
    "mistral": SHAPE,
    "gemma3": {"text_config": GEMMA, "vision_config": VISION},
}
ALONE = {
    "xlnet": {**GPT, "d_model": 32, "d_inner": 32},
    "t5": {**T5, "decoder_start_token_id": 0, "eos_token_id": 256, "pad_token_id": 0, "num_labels": 2},
    "fnet": {**SMALL, "intermediate_size": 32, "max_position_embeddings": 64, "type_vocab_size": 2},
    "phi3": {**PHI, **SPECIAL},
}


def config_of(kind):
    return AutoConfig.for_model(kind, **{"num_labels": 1, **{**SHARED, **ALONE}[kind]})


# T5 reads at its eos.
TOKENIZER = byte_tokenizer("<eos>", template="{% for message in messages %}{{ message.content }} {% endfor %}<eos>")
BATCH = [[Passage("q", False), Passage(answer, True)] for answer in ("a", "a b c d e f g", "a b c", "a b c d e f h")]


@pytest.fixture(scope="module", params=[*SHARED, *ALONE])
def made(request, tmp_path_factory):
    """The architecture, the library's own model, and ours in which all inputs would fit one pass."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(request.param)).eval()
    folder = save(tmp_path_factory.mktemp("models") / request.param, model, TOKENIZER)
    return request.param, model, load_outcome_model(OutcomeModelConfig(path=str(folder)))


@pytest.mark.slow
def test_scores_are_those_of_a_plain_forward_whatever_shares_the_batch(made):
    kind, model, ours = made
    assert classifies_padded(model) == (kind in SHARED)
    ids = [TOKENIZER.encode(f"{question.text} {answer.text} <eos>") for question, answer in BATCH]
    with torch.no_grad():
        logits = [model(torch.tensor([each])).logits[0] for each in ids]
    plain = [float(each[0] if len(each) == 1 else each.softmax(-1)[1]) for each in logits]
    assert ours.score(BATCH) == pytest.approx(plain, abs=1e-5)
    assert len({round(score, 5) for score in plain}) == len(BATCH), "the inputs have different scores"


@pytest.mark.slow
def test_an_input_of_the_longest_length_is_read_and_a_longer_one_refused(made):
    kind, model, ours = made
    limit = longest_input(model)
    assert (limit == sys.maxsize) == (kind in ("bloom", "t5", "xlnet"))
    if limit > 600:
        return
    fits, too_long = ([[Passage("q", False), Passage("a" * length, True)]] for length in (limit - 4, limit - 3))
    assert len(ours.score(fits)) == 1
    with pytest.raises(ScoringError, match=f"reads {limit}"):
        ours.score(too_long)


@pytest.mark.parametrize("kind", ["bert", "xlnet", "t5"])
def test_a_backbone_that_looks_ahead_scores_no_steps(tmp_path, kind):
    head = {"v_head.summary.weight": torch.ones(1, HIDDEN), "v_head.summary.bias": torch.zeros(1)}
    folder = save(tmp_path / kind, AutoModel.from_config(config_of(kind)), TOKENIZER, **head)
    with pytest.raises(ConfigError, match=r"not causal|cannot be loaded"):
        load(folder, "skywork_prm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mistral", "phi3"])
def test_a_decoder_passes_in_every_precision(kind, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).to(dtype).eval()
    assert is_causal(model.base_model)
    assert logits_are_the_heads(model)


def test_positions_that_depend_on_the_length_are_those_of_the_input_alone():
    torch.manual_seed(0)
    backbone = Phi3Model(Phi3Config(**PHI, **SPECIAL))
    short, long = (Encoded(list(range(3, 3 + length)), [[4], [length - 1]]) for length in (10, 40))
    reader = CausalReader(backbone, linear(torch.linspace(-1, 1, HIDDEN)), 10_000)
    reader.pass_cost = 10_000
    together = reader.read([short, long])
    for each, found in zip([short, long], together, strict=True):
        with torch.no_grad():
            hidden = backbone(torch.tensor([each.ids])).last_hidden_state[0]
        reads = [read for (read,) in each.reads]
        assert found == pytest.approx((hidden[reads] @ torch.linspace(-1, 1, HIDDEN)).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "plain"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 30.0}, False),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": None}, True),
        ("cohere", {"logit_scale": 0.5}, False),
        ("granite", {"logits_scaling": 8.0}, False),
        ("llama", {}, True),
        ("mistral", {}, True),
    ],
)
def test_a_model_that_caps_or_scales_its_logits_is_refused(tmp_path, kind, changes, plain):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **SPECIAL, **changes))
    assert logits_are_the_heads(model.eval()) == plain
    folder = save(tmp_path / kind, model, byte_tokenizer("ки"))
    if not plain:
        for family, params in (("math_shepherd", {}), ("prime", {"reference": str(folder)})):
            with pytest.raises(ConfigError, match="caps its logits"):
                load(folder, family, params=params)
