"""Each built-in family as a tiny random model of its architecture, in a folder as it is published, and its definition:
the scores of one transcript by one plain forward pass, as the model card or the authors' script computes them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from tests.scoring.models.support import CHATML, HIDDEN, LLAMA3, SHAPE, byte_tokenizer, plain, save

CHAT = byte_tokenizer("<|im_start|>", "<|im_end|>", "<pad>", template=CHATML)
CHAT.pad_token = "<pad>"
PLAIN = byte_tokenizer("<pad>")
PLAIN.pad_token = "<pad>"
ENDING = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", bos="<s>", template=LLAMA3)
ENDING.eos_token = "<|eot|>"
MARKED = byte_tokenizer("<|im_start|>", "<|im_end|>", "<extra_0>", template=CHATML)
SHEPHERD = byte_tokenizer("ки", bos="<s>", add_bos=True)
TURNS = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", bos="<s>", add_bos=True, template=LLAMA3)
WITH_BOS = byte_tokenizer(bos="<s>")
BETA = 0.3

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


@dataclass(frozen=True)
class Family:
    """`scores` is the definition: a number for each step, or one for the episode."""

    name: str
    folder: Path
    scores: Callable[[Any], Any]
    params: dict[str, Any] = field(default_factory=dict)


def seeded(model_class, config, seed=0):
    torch.manual_seed(seed)
    return model_class(config).eval()


def log_odds(logits):
    """Return the log-odds of the second logit of each pair, which is that of a good step."""
    probability = logits.softmax(-1)
    return probability[:, 1].log() - probability[:, 0].log()


def value_head(root):
    backbone = seeded(Qwen3Model, Qwen3Config(**SHAPE, head_dim=16))
    head = {"weight": torch.randn(1, HIDDEN), "bias": torch.randn(1)}
    folder = save(root / "value_head", backbone, CHAT)
    save_file(head, folder / "value_head.safetensors")

    def scores(transcript):
        ids, ends = [], []
        for passage in transcript:
            ids += CHAT.encode(passage.text)
            ends += [len(ids) - 1] if passage.is_step else []
        return backbone(torch.tensor([ids])).last_hidden_state[0][ends] @ head["weight"][0] + head["bias"]

    return Family("value_head", folder, scores)


def qwen_head():
    torch.manual_seed(1)
    names = {"score.0": (HIDDEN, HIDDEN), "score.2": (2, HIDDEN)}
    return {f"{n}.weight": torch.randn(*shape) for n, shape in names.items()} | {
        f"{n}.bias": torch.randn(shape[0]) for n, shape in names.items()
    }


def qwen_prm(root):
    backbone, head = seeded(Qwen2Model, Qwen2Config(**SHAPE)), qwen_head()
    folder = root / "qwen_prm"
    backbone.save_pretrained(folder, state_dict={f"model.{n}": w for n, w in backbone.state_dict().items()} | head)
    MARKED.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    config["auto_map"] = {"AutoModel": "modeling_tiny.TinyProcessRewardModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(REMOTE_CODE)

    def scores(transcript):
        problem, steps = plain(transcript)
        system = "Please reason step by step, and put your final answer within \\boxed{}."
        messages = [("system", system), ("user", problem), ("assistant", "<extra_0>".join([*steps, ""]))]
        text = MARKED.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
        ids = torch.tensor([MARKED.encode(text)])
        hidden = backbone(ids).last_hidden_state[0][ids[0] == MARKED.convert_tokens_to_ids("<extra_0>")]
        inner = torch.relu(hidden @ head["score.0.weight"].T + head["score.0.bias"])
        return log_odds(inner @ head["score.2.weight"].T + head["score.2.bias"])

    return Family("qwen_prm", folder, scores)


def skywork_head():
    torch.manual_seed(1)
    return {"v_head.summary.weight": torch.randn(1, HIDDEN), "v_head.summary.bias": torch.randn(1)}


def skywork_prm(root):
    model, head = seeded(Qwen2ForCausalLM, Qwen2Config(**SHAPE)), skywork_head()
    newline = WITH_BOS.encode("\n")[-1]

    def scores(transcript):
        problem, steps = plain(transcript)
        ids, flags = WITH_BOS.encode("<s>" + problem + "\n"), []
        for step in steps:
            for line in step.split("\n"):
                ids += [*WITH_BOS.encode(line), newline]
            flags.append(len(ids) - 1)
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        return hidden[flags] @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]

    return Family("skywork_prm", save(root / "skywork_prm", model, WITH_BOS, **head), scores)


def math_shepherd(root):
    model = seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=40))
    bad, good, marker = (SHEPHERD.encode(text)[-1] for text in ("-", "+", "ки"))

    def scores(transcript):
        problem, steps = plain(transcript)
        # Letter by letter, so that a marker inside a step is spelled out.
        ids = SHEPHERD.encode(f"{problem} ")
        for index, step in enumerate(steps):
            ids += [token for letter in "\n" * (index > 0) + step + " " for token in SHEPHERD.encode(letter)[1:]]
            ids += [marker]
        logits = model(torch.tensor([ids])).logits[0][[at for at, token in enumerate(ids) if token == marker]]
        return log_odds(logits[:, [bad, good]])

    return Family("math_shepherd", save(root / "math_shepherd", model, SHEPHERD), scores)


def rlhflow(root):
    model = seeded(LlamaForCausalLM, LlamaConfig(**SHAPE))
    bad, good = (TURNS.encode(text)[-1] for text in "-+")

    def scores(transcript):
        """Step by step: the conversation so far, read two tokens before its end, where the answer is predicted."""
        problem, steps = plain(transcript)
        conversation, found = [], []
        for index, step in enumerate(steps):
            text = step if index else f"{problem} {step}"
            conversation += [{"role": "user", "content": text}, {"role": "assistant", "content": "+"}]
            ids = TURNS.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
            found.append(log_odds(model(ids).logits[:, -3, [bad, good]]))
        return torch.cat(found) if found else torch.zeros(0)

    return Family("rlhflow", save(root / "rlhflow", model, TURNS), scores)


def prime(root):
    phi, reference = (seeded(Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16), seed) for seed in (0, 1))
    folder, other = save(root / "phi", phi, CHAT), save(root / "reference", reference, CHAT)

    def scores(transcript):
        ids, owner = [], []
        for index, passage in enumerate(transcript):
            tokens = CHAT.encode(passage.text)
            ids += tokens
            owner += [index if passage.is_step else -1] * len(tokens)
        tokens = torch.tensor([ids])
        one, two = (each(tokens).logits[0].log_softmax(-1) for each in (phi, reference))
        ratio = [0.0, *(float(one[t - 1, ids[t]] - two[t - 1, ids[t]]) for t in range(1, len(ids)))]
        steps = [index for index, passage in enumerate(transcript) if passage.is_step]
        return np.array([BETA * sum(r for r, o in zip(ratio, owner, strict=True) if o == step) for step in steps])

    return Family("prime", folder, scores, {"reference": str(other), "beta": BETA})


def decoder(labels, pad_token_id=258):
    config = Qwen2Config(**SHAPE, num_labels=labels, pad_token_id=pad_token_id)
    return seeded(Qwen2ForSequenceClassification, config)


def encoder():
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    return seeded(BertForSequenceClassification, BertConfig(**shape, num_labels=2))


CLASSIFIERS = {
    "reward": lambda: (decoder(1), CHAT),
    "labels": lambda: (decoder(3), CHAT),
    "bert": lambda: (encoder(), PLAIN),
    "without padding": lambda: (decoder(1, pad_token_id=None), ENDING),
    "padded with what ends it": lambda: (decoder(1, pad_token_id=ENDING.eos_token_id), ENDING),
    "padded with no token": lambda: (decoder(1, pad_token_id=-1), ENDING),
}


def classifier(kind):
    def make(root):
        model, tokenizer = CLASSIFIERS[kind]()

        def scores(transcript):
            problem, steps = plain(transcript)
            response = "\n".join(steps)
            text = f"{problem}\n{response}"
            if tokenizer.chat_template:
                messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": response}]
                text = tokenizer.apply_chat_template(messages, tokenize=False)
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
            return logits[:1] if len(logits) == 1 else logits.softmax(-1)[1:2]

        return Family("sequence_classifier", save(root / kind, model, tokenizer), scores)

    return make


FAMILIES = {each.__name__: each for each in (value_head, qwen_prm, skywork_prm, math_shepherd, rlhflow, prime)}
FAMILIES |= {f"sequence_classifier, {kind}": classifier(kind) for kind in CLASSIFIERS}
