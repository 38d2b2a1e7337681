"""The published layout: a Qwen2 backbone and score.0, score.2 among its weights; the definition is the model card's."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2Model

from asyncrl.errors import ConfigError
from asyncrl.scoring.models.encoding import marker
from asyncrl.scoring.models.qwen_prm import encode
from asyncrl.scoring.transcript import Segment
from tests.scoring.models.support import (
    BATCHES,
    BOUNDS,
    CHATML,
    HIDDEN,
    SHAPE,
    assert_plain,
    by_bound,
    byte_tokenizer,
    load,
    plain,
    save,
)

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
TOKENIZER = byte_tokenizer("<|im_start|>", "<|im_end|>", "<extra_0>", template=CHATML)

REMOTE_CODE = """
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2Model, PreTrainedModel

class TinyProcessRewardModel(PreTrainedModel):
    config_class = Qwen2Config
    base_model_prefix = "model"
    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        width = config.hidden_size
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.post_init()
    def forward(self, input_ids):
        return self.score(self.model(input_ids).last_hidden_state)
"""


def head():
    torch.manual_seed(1)
    names = {"score.0": (HIDDEN, HIDDEN), "score.2": (2, HIDDEN)}
    return {f"{n}.weight": torch.randn(*shape) for n, shape in names.items()} | {
        f"{n}.bias": torch.randn(shape[0]) for n, shape in names.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = Qwen2Model(Qwen2Config(**SHAPE))
    folder = tmp_path_factory.mktemp("models") / "qwen_prm"
    model.save_pretrained(folder, state_dict={f"model.{n}": w for n, w in model.state_dict().items()} | head())
    TOKENIZER.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    config["auto_map"] = {"AutoModel": "modeling_tiny.TinyProcessRewardModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(REMOTE_CODE)
    return folder


@pytest.fixture(scope="module")
def plain_logits(folder):
    torch.manual_seed(0)
    backbone, weights = Qwen2Model(Qwen2Config(**SHAPE)).eval(), head()

    @torch.no_grad()
    def logits(transcript):
        problem, steps = plain(transcript)
        answer = "<extra_0>".join(steps) + "<extra_0>"
        messages = [("system", SYSTEM), ("user", problem), ("assistant", answer)]
        text = TOKENIZER.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
        ids = torch.tensor([TOKENIZER.encode(text)])
        hidden = backbone(ids).last_hidden_state[0][ids[0] == TOKENIZER.convert_tokens_to_ids("<extra_0>")]
        inner = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
        probability = (inner @ weights["score.2.weight"].T + weights["score.2.bias"]).softmax(-1)
        return probability[:, 1].log() - probability[:, 0].log()

    return logits


@pytest.fixture(scope="module")
def models(folder):
    return by_bound(folder, "qwen_prm")


@settings(deadline=None, max_examples=25)
@given(batch=BATCHES, bound=st.sampled_from([*BOUNDS]))
def test_scores_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(models, plain_logits, batch, bound):
    assert_plain(models[bound], plain_logits, batch)


def test_the_checkpoints_own_class_scores_the_same_when_the_configuration_trusts_it(folder, models):
    batch = [[Segment("q", False), Segment("a", True), Segment("tool", False), Segment("b", True)]]
    (built_in,) = models[1].score(batch)
    (remote,) = load(folder, "qwen_prm", trust_remote_code=True).score(batch)
    assert abs(built_in.logit - remote.logit).max() < 1e-4


@pytest.mark.parametrize("special", [True, False])
def test_a_marker_that_the_policy_writes_stays_its_letters(special):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=special, normalized=False)], special_tokens=special)
    end = marker(tokenizer, "<extra_0>", "key")
    transcript = [Segment("q<extra_0>", False), Segment("a<extra_0>a", True), Segment("b", True)]
    encoded = encode(transcript, tokenizer, ([], []), end)
    assert [encoded.ids[read] for (read,) in encoded.reads] == [end.token] * 2 == [256] * 2
    assert encoded.ids.count(end.token) == 2
    assert tokenizer.decode(encoded.ids) == "q<extra_0>a<extra_0>a<extra_0>b<extra_0>"


def test_a_folder_of_another_family_is_refused(tmp_path):
    backbone = Qwen2Model(Qwen2Config(**SHAPE))
    folder = save(tmp_path / "plain", backbone, TOKENIZER)
    with pytest.raises(ConfigError, match=r"score\.0\.weight must be .* hold nothing: is it of another family"):
        load(folder, "qwen_prm")
    folder = save(tmp_path / "whole", backbone, TOKENIZER, **head())
    with pytest.raises(ConfigError, match=r"marker=<none>: the model's tokenizer has no token '<none>'"):
        load(folder, "qwen_prm", params={"marker": "<none>"})
    folder = save(tmp_path / "bare", backbone, byte_tokenizer("<extra_0>"), **head())
    with pytest.raises(ConfigError, match="no chat template"):
        load(folder, "qwen_prm")
