"""Tiny random models with the real architectures, a byte tokenizer, and what must hold for every family."""

import numpy as np
import torch
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import ScoringModelConfig
from asyncrl.scoring.models.registry import load_prm
from asyncrl.scoring.transcript import Segment

HIDDEN, LONGEST, VOCABULARY = 32, 512, 272
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
}
BOUNDS = {1: 1, 300: 8, 10_000: 60}
"""Bounds on micro-batches, each with the cost of a pass: inputs alone, a few together, many with padding."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<s>{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n"
    "{{ message.content | trim }}<|eot|>{% endfor %}"
)


def byte_tokenizer(*tokens, template=None, bos=None, add_bos=False):
    """One token a byte, besides those named."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [*([bos] if bos else []), *tokens]
    backend.add_tokens([AddedToken(token, special=token.startswith("<"), normalized=False) for token in special])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 256)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, extra_special_tokens=[t for t in tokens if t.startswith("<")]
    )
    tokenizer.chat_template = template
    return tokenizer


def save(folder, model, tokenizer, **tensors):
    """A folder as it is published, with further tensors among its weights."""
    model.save_pretrained(folder, state_dict={**model.state_dict(), **tensors})
    tokenizer.save_pretrained(folder)
    return folder


def load(folder, family, **changes):
    return load_prm(ScoringModelConfig(family=family, path=str(folder), **changes), "scoring.prm")


def by_bound(folder, family, **changes):
    """The model with each bound on its micro-batches, and passes cheap enough for prefixes to be shared."""
    loaded = {bound: load(folder, family, micro_tokens=bound, **changes) for bound in BOUNDS}
    for bound, model in loaded.items():
        for reader in (getattr(model, name, None) for name in ("_reader", "phi", "_reference")):
            if reader is not None:
                reader.pass_cost = BOUNDS[bound]
    return loaded


_TEXT = st.text("abc 12+é\n", min_size=1, max_size=8).filter(str.strip)
_PROBLEM = st.sampled_from(["what is 12 + 5?", "what is 12 + 7?", "é"])


@st.composite
def transcripts(draw):
    """A prompt, then steps and tool results; members of a group begin alike."""
    problem = draw(_PROBLEM)
    tail = draw(st.lists(st.tuples(_TEXT, st.booleans()), max_size=4))
    prompt = Segment(f"<|im_start|>user\n{problem}<|im_end|>\n", False, problem)
    kinds = [index == 0 or is_step for index, (_, is_step) in enumerate(tail)]
    texts = [text for text, _ in tail]
    return [prompt, *(Segment(t + "<|im_end|>" * step, step, t) for t, step in zip(texts, kinds, strict=True))]


BATCHES = st.lists(transcripts(), max_size=6)


def assert_plain(model, plain_logits, batch):
    """Every score is that of `plain_logits(transcript)`, one plain forward of one sequence."""
    scores = model.score(batch)
    assert len(scores) == len(batch)
    for transcript, found in zip(batch, scores, strict=True):
        steps = [segment for segment in transcript if segment.is_step]
        assert found.probability.shape == found.logit.shape == (len(steps),)
        if steps:
            logits = torch.as_tensor(plain_logits(transcript), dtype=torch.float32)
            np.testing.assert_allclose(found.logit, logits.numpy(), rtol=2e-5, atol=1e-4)
            np.testing.assert_allclose(found.probability, torch.sigmoid(logits).numpy(), atol=1e-4)


def plain(transcript):
    """The problem, and the steps with the tool results before each, as a chat would have them."""
    problem, *rest = transcript
    steps, context = [], ""
    for segment in rest:
        if segment.is_step:
            steps.append(context + segment.plain.strip())
            context = ""
        else:
            context += segment.plain.strip() + "\n"
    return problem.plain.strip(), steps
