import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.encoding import tokenize
from asyncrl.scoring.models.value_head import load_value_head
from asyncrl.scoring.transcript import Segment

HIDDEN, LONGEST = 32, 64


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random process reward model."""
    folder = tmp_path_factory.mktemp("models") / "prm"
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=256, max_position_embeddings=LONGEST, initializer_range=0.5, **shape, **heads)
    Qwen3Model(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    save_file({"weight": torch.randn(1, HIDDEN), "bias": torch.randn(1)}, folder / "value_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def plain_scores(folder):
    """The definition: one sequence, one forward pass, sigmoid of the value at each step's last token."""
    backbone = Qwen3Model.from_pretrained(folder).eval()
    head = load_file(folder / "value_head.safetensors")

    @torch.no_grad()
    def score(transcript):
        ids, ends = tokenize(transcript, byte_tokenizer())
        hidden = backbone(torch.tensor([ids])).last_hidden_state[0]
        return torch.sigmoid(hidden[ends] @ head["weight"][0] + head["bias"]).numpy()

    return score


SEGMENTS = st.lists(st.builds(Segment, st.text("abc 12+é", min_size=1, max_size=6), st.booleans()), max_size=4)


BOUNDS = (1, 20, 60, 10_000)


@pytest.fixture(scope="module")
def by_bound(folder):
    """The model with each bound on its micro-batches."""
    return {bound: load_value_head(str(folder), micro_tokens=bound) for bound in BOUNDS}


@settings(deadline=None, max_examples=25)
@given(transcripts=st.lists(SEGMENTS, max_size=6), bound=st.sampled_from(BOUNDS))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(by_bound, plain_scores, transcripts, bound):
    scores = by_bound[bound].score(transcripts)
    assert len(scores) == len(transcripts)
    for transcript, found in zip(transcripts, scores, strict=True):
        steps = sum(segment.is_step for segment in transcript)
        assert found.probability.shape == (steps,)
        assert found.probability.dtype == np.float32
        if steps:
            np.testing.assert_allclose(found.probability, plain_scores(transcript), atol=1e-5)


def test_a_step_is_judged_by_what_came_before_its_end_and_by_nothing_after(folder):
    model = load_value_head(str(folder))
    begin = [Segment("12+5", False), Segment("=17", True)]
    (short,), (long,) = model.score([begin]), model.score([[*begin, Segment("so 18", True)]])
    np.testing.assert_allclose(long.probability[:1], short.probability, atol=1e-6)
    assert abs(long.probability[1] - long.probability[0]) > 1e-4


def test_a_transcript_that_is_too_long_is_refused_and_never_cut(folder):
    model = load_value_head(str(folder))
    fits = [Segment("x" * LONGEST, True)]
    assert model.score([fits])[0].probability.shape == (1,)
    with pytest.raises(ScoringError, match=r"has 65 tokens; prm@[0-9a-f]{8} reads 64"):
        model.score([fits, [Segment("x" * LONGEST, False), Segment("y", True)]])


def test_the_name_changes_with_the_weights(folder, tmp_path):
    other = tmp_path / "prm"
    other.symlink_to(folder)
    first = load_value_head(str(folder)).name
    assert load_value_head(str(other)).name == first
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).symlink_to(file)
    (changed / "value_head.safetensors").unlink()
    save_file({"weight": torch.ones(1, HIDDEN), "bias": torch.zeros(1)}, changed / "value_head.safetensors")
    assert load_value_head(str(changed)).name.split("@")[1] != first.split("@")[1]


def test_a_folder_of_another_family_is_refused_with_the_fix(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no value_head\.safetensors"):
        load_value_head(str(tmp_path))
    for file in folder.iterdir():
        if file.name != "value_head.safetensors":
            (tmp_path / file.name).symlink_to(file)
    save_file({"weight": torch.ones(2, HIDDEN), "bias": torch.zeros(1)}, tmp_path / "value_head.safetensors")
    with pytest.raises(ConfigError, match=r"must hold weight \(1, 32\)"):
        load_value_head(str(tmp_path))
