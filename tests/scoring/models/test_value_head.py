import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3Model

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import BATCHES, BOUNDS, HIDDEN, LONGEST, SHAPE, assert_plain, by_bound, byte_tokenizer
from tests.scoring.models.support import load as load_family


def load(folder, **changes):
    return load_family(folder, "value_head", **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random process reward model."""
    folder = tmp_path_factory.mktemp("models") / "prm"
    torch.manual_seed(0)
    Qwen3Model(Qwen3Config(**SHAPE, head_dim=16)).save_pretrained(folder)
    byte_tokenizer("<|im_start|>", "<|im_end|>").save_pretrained(folder)
    save_file({"weight": torch.randn(1, HIDDEN), "bias": torch.randn(1)}, folder / "value_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def plain_logits(folder):
    """The definition: one sequence, one forward pass, the value at each step's last token."""
    backbone, head = Qwen3Model.from_pretrained(folder).eval(), load_file(folder / "value_head.safetensors")
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")

    @torch.no_grad()
    def logits(transcript):
        ids, ends = [], []
        for segment in transcript:
            ids += tokenizer.encode(segment.text)
            ends += [len(ids) - 1] if segment.is_step else []
        hidden = backbone(torch.tensor([ids])).last_hidden_state[0]
        return hidden[ends] @ head["weight"][0] + head["bias"]

    return logits


@pytest.fixture(scope="module")
def models(folder):
    return by_bound(folder, "value_head")


@settings(deadline=None, max_examples=25)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, plain_logits, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


def test_a_step_is_judged_by_what_came_before_its_end_and_by_nothing_after(folder):
    model = load(folder)
    begin = [Segment("12+5", False), Segment("=17", True)]
    (short,), (long,) = model.score([begin]), model.score([[*begin, Segment("so 18", True)]])
    assert abs(long.probability[0] - short.probability[0]) < 1e-6
    assert abs(long.logit[1] - long.logit[0]) > 1e-4


def test_a_step_without_text_is_scored_where_it_stands(folder):
    model = load(folder)
    (scores,) = model.score([[Segment("12", False), Segment("", True), Segment("3", True)]])
    (same,) = model.score([[Segment("1", False), Segment("2", True)]])
    assert abs(scores.logit[0] - same.logit[0]) < 1e-4
    with pytest.raises(ScoringError, match="no text"):
        model.score([[Segment("", True)]])


def test_a_transcript_that_is_too_long_is_refused_and_never_cut(folder):
    model = load(folder)
    fits = [Segment("x" * LONGEST, True)]
    assert len(model.score([fits])[0]) == 1
    with pytest.raises(ScoringError, match=r"has 513 tokens; prm@[0-9a-f]{8} reads 512"):
        model.score([fits, [Segment("x" * LONGEST, False), Segment("y", True)]])


def test_the_name_changes_with_the_weights(folder, tmp_path):
    other = tmp_path / "prm"
    other.symlink_to(folder)
    first = load(folder).name
    assert load(other).name == first
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).symlink_to(file)
    (changed / "value_head.safetensors").unlink()
    save_file({"weight": torch.ones(1, HIDDEN), "bias": torch.zeros(1)}, changed / "value_head.safetensors")
    assert load(changed).name.split("@")[1] != first.split("@")[1]


def test_a_folder_of_another_family_is_refused_with_the_fix(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no value_head\.safetensors"):
        load(tmp_path)
    for file in folder.iterdir():
        if file.name != "value_head.safetensors":
            (tmp_path / file.name).symlink_to(file)
    save_file({"weight": torch.ones(2, HIDDEN), "bias": torch.zeros(1)}, tmp_path / "value_head.safetensors")
    with pytest.raises(ConfigError, match=r"weight must be \(1, 32\)"):
        load(tmp_path)


@pytest.mark.parametrize("device", ["nowhere", "cuda"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"scoring\.prm\.path=.*cannot be loaded"):
        load(folder, device=device)


@pytest.mark.parametrize(("dtype", "apart"), [("float16", 0.01), ("bfloat16", 0.1)])
def test_lower_precision_scores_nearly_the_same(folder, dtype, apart):
    batch = [[Segment("12+5", False), *(Segment(f"={k} so", True) for k in range(length))] for length in (1, 5, 20)]
    for exact, rough in zip(load(folder).score(batch), load(folder, dtype=dtype).score(batch), strict=True):
        assert abs(exact.probability - rough.probability).max() < apart
