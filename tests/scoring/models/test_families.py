"""The promises of every family of models, and the inputs that each refuses."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoModel,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models import math_shepherd, skywork_prm
from asyncrl.scoring.transcript import Passage
from tests.scoring.models.families import CHAT, FAMILIES, MARKED, SHEPHERD, TURNS, WITH_BOS, qwen_head, skywork_head
from tests.scoring.models.support import BATCHES, CHATML, HIDDEN, LONGEST, SHAPE, byte_tokenizer, load, save

BOUNDS = {1: 1, 300: 8, 10_000: 60}
"""Bounds on micro-batches, each with the cost of a pass: inputs alone, a few together, many with padding."""
STEPS = [Passage("q", False), Passage("a", True), Passage("tool", False), Passage("b", True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every family by name, made once."""
    root, known = tmp_path_factory.mktemp("models"), {}

    def make(name):
        return known[name] if name in known else known.setdefault(name, FAMILIES[name](root))

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, made):
    return made(request.param)


@pytest.fixture(scope="module")
def models(family):
    """The model for each bound, with passes cheap enough for prefixes to be shared."""
    loaded = {bound: load(family.folder, family.name, micro_tokens=bound, params=family.params) for bound in BOUNDS}
    for bound, model in loaded.items():
        for reader in getattr(model, "readers", ()):
            reader.pass_cost = BOUNDS[bound]
    return loaded


def shrunk(folder, source, rows):
    """A copy of a model's folder whose embedding, and head, have only the first rows."""
    shutil.copytree(source, folder)
    for file in folder.glob("model*.safetensors"):
        tensors = load_file(file)
        by_token = {
            name
            for name in tensors
            if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "lm_head.weight"))
        }
        save_file({name: each[:rows].clone() if name in by_token else each for name, each in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows, "pad_token_id": None}))
    return folder


OWN_TOKENS = {
    **{"qwen_prm": "<extra_0>", "skywork_prm": "<s>", "math_shepherd": "ки", "rlhflow": "<|eot|>"},
    **{"sequence_classifier, reward": "<|im_end|>", "sequence_classifier, without padding": "<|eot|>"},
}
"""The token with the largest id that a family writes itself."""


@pytest.mark.parametrize("name", OWN_TOKENS)
def test_a_token_of_the_family_beyond_the_embedding_is_refused_by_name_when_the_model_is_loaded(made, tmp_path, name):
    family = made(name)
    token = OWN_TOKENS[name]
    number = AutoTokenizer.from_pretrained(family.folder).convert_tokens_to_ids(token)
    load(shrunk(tmp_path / "fits", family.folder, number + 1), family.name, params=family.params)
    folder = shrunk(tmp_path / "short", family.folder, number)
    with pytest.raises(ConfigError) as caught:
        load(folder, family.name, params=family.params)
    for said in (str(folder), f"family {family.name} ", repr(token), f"id is {number}", f"has {number} rows"):
        assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["value_head", "prime"])
def test_a_token_of_a_transcript_beyond_the_embedding_is_refused_with_its_number(made, tmp_path, name):
    family = made(name)
    params = dict(family.params)
    number = CHAT.convert_tokens_to_ids("<|im_end|>")
    folder = shrunk(tmp_path / "short", family.folder, number)
    for model in (
        load(folder, name, params=params),
        *([load(family.folder, name, params={**params, "reference": str(folder)})] if params else []),
    ):
        with pytest.raises(ScoringError, match=f"has the token id {number}.* has {number}"):
            model.score([[Passage("q", False), Passage("a<|im_end|>", True)]])
        assert len(model.score([STEPS])) == 1


def test_a_label_beyond_the_head_is_refused_by_name(made, tmp_path):
    family = made("math_shepherd")
    number = SHEPHERD.encode("-")[-1]
    with pytest.raises(ConfigError, match=f"id is {SHEPHERD.encode('+')[-1]}|id is {number}"):
        load(shrunk(tmp_path / "short", family.folder, min(number, SHEPHERD.encode("+")[-1])), family.name)


def scores_of(model, batch):
    """An array an episode: the logits of its steps, or the one score of the whole."""
    return [np.atleast_1d(getattr(each, "logit", each)) for each in model.score(batch)]


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(family, models, batch, bound):
    with torch.no_grad():
        expected = [np.asarray(family.scores(transcript)) for transcript in batch]
    found = scores_of(models[bound], batch)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-4)


@pytest.mark.slow
def test_an_input_that_is_too_long_is_refused_and_never_cut(models):
    long = [Passage("x" * LONGEST, False), Passage("y", True)]
    with pytest.raises(ScoringError, match=r"has \d+ tokens; .*@[0-9a-f]{8} reads 512"):
        models[1].score([STEPS, long])


@pytest.mark.parametrize(
    ("name", "dtype", "apart"),
    [
        ("value_head", "float16", 0.05),
        ("value_head", "bfloat16", 0.4),
        ("sequence_classifier, reward", "float16", 0.02),
        ("sequence_classifier, reward", "bfloat16", 0.2),
    ],
)
def test_lower_precision_scores_nearly_the_same(made, name, dtype, apart):
    family = made(name)
    batch = [[Passage("12+5", False), *(Passage(f"={k} so", True) for k in range(length))] for length in (1, 5, 20)]
    exact, rough = (scores_of(load(family.folder, family.name, dtype=each), batch) for each in ("float32", dtype))
    for one, other in zip(exact, rough, strict=True):
        np.testing.assert_allclose(one, other, atol=apart)


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False])
def test_a_marker_that_the_policy_writes_is_not_read_and_stays_its_letters(made, tmp_path, special):
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)
    tokenizer.add_tokens([AddedToken("<extra_0>", special=special, normalized=False)], special_tokens=special)
    folder = save(tmp_path / "qwen", Qwen2Model(Qwen2Config(**SHAPE)), tokenizer, **qwen_head())
    letters = "<extra_0>"
    written = [Passage(f"q{letters}", False), Passage(f"a{letters}a", True), Passage("b", True)]
    (marked,) = load(folder, "qwen_prm").score([written])
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", "<unused>", "<other>", template=CHATML)
    folder = save(tmp_path / "renamed", Qwen2Model.from_pretrained(folder), tokenizer, **qwen_head())
    (unmarked,) = load(folder, "qwen_prm", params={"marker": "<unused>"}).score([written])
    np.testing.assert_allclose(marked.logit, unmarked.logit, atol=1e-4)
    shepherd = made("math_shepherd")
    written = [Passage("q", False), Passage("a ки a", True), Passage("b", True)]
    with torch.no_grad():
        np.testing.assert_allclose(
            *scores_of(load(shepherd.folder, shepherd.name), [written]), shepherd.scores(written), atol=1e-4
        )


class Merging:
    """A tokenizer that joins a newline with the character before it."""

    bos_token_id = 0

    def encode(self, text, **_):
        return [ord(letter) for letter in text.replace(".\n", "¶").replace("\n\n", "§")]


def test_skywork_reads_a_step_of_several_lines_at_its_last():
    steps = [Passage("q", False), Passage("a.\n\nb\n", True), Passage("c", True)]
    encoded = skywork_prm.encode(steps, Merging(), "\n", 10)
    assert "".join(map(chr, encoded.ids)) == "\0q\na.\n\nb\nc\n"
    assert encoded.reads == [[8], [10]]


def test_weights_stored_by_torch_are_read_too(made, tmp_path):
    safe = made("skywork_prm")
    for file in safe.folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    model = Qwen2ForCausalLM.from_pretrained(safe.folder)
    torch.save({**model.state_dict(), **skywork_head()}, tmp_path / "pytorch_model.bin")
    (stored,), (expected,) = (scores_of(load(each, safe.name), [STEPS]) for each in (tmp_path, safe.folder))
    assert abs(stored - expected).max() < 1e-6


def test_the_checkpoints_own_class_scores_the_same_when_the_configuration_trusts_it(made):
    folder = made("qwen_prm").folder
    built_in, remote = (scores_of(load(folder, "qwen_prm", trust_remote_code=each), [STEPS]) for each in (False, True))
    np.testing.assert_allclose(built_in, remote, atol=1e-4)


def test_a_step_is_judged_by_what_came_before_its_end_and_by_nothing_after(made):
    model = load(made("value_head").folder, "value_head")
    begin = [Passage("12+5", False), Passage("=17", True)]
    (short,), (long,) = model.score([begin]), model.score([[*begin, Passage("so 18", True)]])
    assert abs(long.probability[0] - short.probability[0]) < 1e-6
    assert abs(long.logit[1] - long.logit[0]) > 1e-4


def test_a_step_without_text_is_scored_where_it_stands(made):
    model = load(made("value_head").folder, "value_head")
    (scores,) = model.score([[Passage("12", False), Passage("", True), Passage("3", True)]])
    (same,) = model.score([[Passage("1", False), Passage("2", True)]])
    assert abs(scores.logit[0] - same.logit[0]) < 1e-4
    with pytest.raises(ScoringError, match="no text"):
        model.score([[Passage("", True)]])


def test_a_model_that_is_its_own_reference_finds_nothing_to_reward(made):
    folder = made("prime").folder
    (scores,) = load(folder, "prime", params={"reference": str(folder)}).score([STEPS])
    assert scores.logit.tolist() == [0.0, 0.0]
    assert scores.probability.tolist() == [0.5, 0.5]


def test_the_name_changes_with_the_weights(made, tmp_path):
    folder, other, changed = made("value_head").folder, tmp_path / "value_head", tmp_path / "changed"
    other.symlink_to(folder)
    first = load(folder, "value_head").name
    assert load(other, "value_head").name == first
    changed.mkdir()
    for file in folder.iterdir():
        if file.name != "value_head.safetensors":
            (changed / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"there is no value_head\.safetensors"):
        load(changed, "value_head")
    save_file({"weight": torch.ones(1, HIDDEN), "bias": torch.zeros(1)}, changed / "value_head.safetensors")
    assert load(changed, "value_head").name.split("@")[1] != first.split("@")[1]
    save_file({"weight": torch.ones(2, HIDDEN), "bias": torch.zeros(1)}, changed / "value_head.safetensors")
    with pytest.raises(ConfigError, match=r"weight must have the shape \(1, 32\)"):
        load(changed, "value_head")


@pytest.mark.parametrize("device", ["nowhere", "cuda"])
def test_a_device_that_is_not_there_is_refused(made, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"scoring\.prm\.path=.*cannot be loaded"):
        load(made("value_head").folder, "value_head", device=device)


def qwen(tokenizer, **tensors):
    return partial(save, model=Qwen2Model(Qwen2Config(**SHAPE)), tokenizer=tokenizer, **tensors)


def causal(tokenizer):
    return partial(save, model=Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("family", "saved", "params", "problem"),
    [
        ("qwen_prm", qwen(MARKED), {}, r"score\.0\.weight must have .* hold nothing: is it of another family"),
        (
            "qwen_prm",
            qwen(MARKED, **qwen_head()),
            {"marker": "<no>"},
            "marker=<no>: the model's tokenizer has no token",
        ),
        ("qwen_prm", qwen(byte_tokenizer("<extra_0>"), **qwen_head()), {}, "no chat template"),
        ("skywork_prm", causal(WITH_BOS), {}, r"v_head\.summary\.weight must have .* \(1, 32\); .* hold nothing"),
        ("math_shepherd", causal(WITH_BOS), {}, r"params\.marker=ки: the model's tokenizer has no token"),
        ("rlhflow", causal(WITH_BOS), {}, "no chat template, which this family needs"),
        ("prime", causal(CHAT), {}, "reference must be set"),
    ],
)
def test_a_folder_of_another_family_is_refused_with_the_fix(tmp_path, family, saved, params, problem):
    with pytest.raises(ConfigError, match=problem):
        load(saved(tmp_path / "model"), family, params=params)


def test_what_a_family_cannot_use_is_refused(made, tmp_path):
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match=r"Slow does not give the position .*; add the tokenizer\.json"):
        math_shepherd.reading(Slow(), math_shepherd.Params(), "scoring.prm")
    phi, other = made("prime"), causal(TURNS)(tmp_path / "other")
    with pytest.raises(ConfigError, match="have different tokenizers"):
        load(phi.folder, "prime", params={"reference": str(other)})
    with pytest.raises(ScoringError, match="begins with a step"):
        load(phi.folder, "prime", params=phi.params).score([[Passage("a", True)]])
    with pytest.raises(ConfigError, match="label=3: the model has the labels 0 to 2"):
        load(made("sequence_classifier, labels").folder, "sequence_classifier", params={"label": 3})


def test_another_tokenizer_than_that_of_the_folder_is_used_and_named(made, tmp_path):
    family = made("skywork_prm")
    folder = tmp_path / "bare"
    shutil.copytree(family.folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match="tokenizer"):
        load(folder, family.name)
    model = load(folder, family.name, tokenizer=str(family.folder))
    assert model.name.endswith(f" read by {family.folder.name}")
    transcript = [Passage("1 + 1?", False), Passage("2", True)]
    assert scores_of(model, [transcript])[0] == scores_of(load(family.folder, family.name), [transcript])[0]


def test_layers_are_spread_over_the_gpus_that_the_configuration_names(made, monkeypatch):
    """Without GPUs only the request can be seen: which GPUs, with how much of their memory, and that nothing moves."""
    family, given = made("skywork_prm"), {}
    load_whole = AutoModel.from_pretrained

    def from_pretrained(folder, device_map, max_memory, **kwargs):
        given.update(device_map=device_map, max_memory=max_memory)
        model = load_whole(folder, **kwargs)
        model.hf_device_map = {"layers.0": 0, "layers.1": layer_1}
        return model

    monkeypatch.setattr(AutoModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1000 + number, 2000))
    monkeypatch.setattr("asyncrl.scoring.models.checkpoint.described", str)
    layer_1 = 1
    load(family.folder, family.name, gpus=2, device="auto")
    assert given == {"device_map": "auto", "max_memory": {0: 900, 1: 900}}
    layer_1 = "disk"
    with pytest.raises(ConfigError, match=r"would be on disk: set scoring\.prm\.gpus to more"):
        load(family.folder, family.name, gpus=2, device="auto")
