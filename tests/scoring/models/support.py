"""The shape of tiny random models, a byte tokenizer, and random transcripts."""

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import OutcomeModelConfig, ScoringModelConfig
from asyncrl.scoring.models.registry import OUTCOME_FAMILIES, load_outcome_model, load_prm
from asyncrl.scoring.transcript import Passage

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
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<s>{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n"
    "{{ message.content | trim }}<|eot|>{% endfor %}"
)


def byte_tokenizer(*tokens, template=None, bos=None, add_bos=False, merges=()):
    """A tokenizer with one token a byte, and the named tokens. `merges` are pairs of bytes that are one token."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
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
    if family in OUTCOME_FAMILIES:
        return load_outcome_model(OutcomeModelConfig(family=family, path=str(folder), **changes))
    return load_prm(ScoringModelConfig(family=family, path=str(folder), **changes))


_TEXT = st.text("abc 12+é\n", min_size=1, max_size=8).filter(str.strip)
_PROBLEM = st.sampled_from(["what is 12 + 5?", "what is 12 + 7?", "é"])


@st.composite
def transcripts(draw):
    """A prompt, then steps and tool results; members of a group begin alike."""
    problem = draw(_PROBLEM)
    tail = draw(st.lists(st.tuples(_TEXT, st.booleans()), max_size=4))
    prompt = Passage(f"<|im_start|>user\n{problem}<|im_end|>\n", False, problem)
    kinds = [index == 0 or is_step for index, (_, is_step) in enumerate(tail)]
    texts = [text for text, _ in tail]
    return [prompt, *(Passage(t + "<|im_end|>" * step, step, t) for t, step in zip(texts, kinds, strict=True))]


BATCHES = st.lists(transcripts(), max_size=6)


def plain(transcript):
    """The problem, and the steps with the tool results before each, as a chat would have them."""
    problem, *rest = transcript
    steps, context = [], ""
    for passage in rest:
        if passage.is_step:
            steps.append(context + passage.plain.strip())
            context = ""
        else:
            context += passage.plain.strip() + "\n"
    return problem.plain.strip(), steps
