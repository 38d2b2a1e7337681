"""Tokenizers with chat templates written after the behaviour of real model families, special tokens included.

The templates are this project's own: they do what a family's template does (what it writes in which order, what it
drops, refuses and requires) in other words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.episode.fakes import byte_level

_FOLDER = Path(__file__).parent / "jinja"


@dataclass(frozen=True)
class Family:
    """`special` are special tokens, `marks` added tokens that are not special, `swallowing` those of `special` that
    take in the blanks after them; all of them divided by blanks. `tool_use` has a template of its own for
    conversations with tools."""

    special: str
    eos: str
    bos: str | None = None
    marks: str = ""
    swallowing: str = ""
    tool_use: bool = False
    sentencepiece: bool = False


_CALL = "<tool_call> </tool_call>"
_RESPONSE = "<tool_response> </tool_response>"
_QWEN3 = f"{_CALL} {_RESPONSE} <think> </think>"
_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
_MISTRAL = "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
_TEKKEN = f"{_MISTRAL} [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID]"
_GEMMA = "<bos> <eos> <start_of_turn> <end_of_turn>"
_DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>"
_DEEPSEEK_MARKS = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>"
)
_PHI = "<|system|> <|user|> <|assistant|> <|end|>"
_COMMAND_R = (
    "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"
)
_KIMI = "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"
_KIMI_MARKS = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
    "<|tool_call_end|>"
)

FAMILIES = {
    "qwen2_5": Family(_CHATML, "<|im_end|>", marks=_CALL),
    **dict.fromkeys(("qwen3", "qwen3_coder", "qwq"), Family(_CHATML, "<|im_end|>", marks=_QWEN3)),
    **dict.fromkeys(("llama3_1", "llama3_2", "llama3_3"), Family(_LLAMA, "<|eot_id|>", "<|begin_of_text|>")),
    "mistral_nemo": Family(_MISTRAL, "</s>", "<s>"),
    **dict.fromkeys(("mistral_small_3_2", "devstral"), Family(_TEKKEN, "</s>", "<s>")),
    "gemma2": Family(_GEMMA, "<eos>", "<bos>", marks="\n\n <table>"),
    "gemma3": Family(f"{_GEMMA} <start_of_image>", "<eos>", "<bos>", marks="\n\n <table>"),
    "deepseek_v3": Family(_DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", marks=_DEEPSEEK_MARKS),
    "deepseek_v3_1": Family(
        _DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        marks=f"{_DEEPSEEK_MARKS} <think> </think>",
    ),
    "deepseek_r1_distill": Family(
        _DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        marks=f"{_DEEPSEEK_MARKS} <think> </think>",
    ),
    "glm4_5": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<|endoftext|>",
        marks=f"{_QWEN3} <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "gpt_oss": Family("<|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>", "<|return|>"),
    "phi3_5": Family(f"<s> </s> <|endoftext|> {_PHI}", "<|endoftext|>", "<s>", swallowing=_PHI, sentencepiece=True),
    "phi4": Family("<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", "<|im_end|>"),
    "hermes3": Family(f"{_LLAMA} <|im_start|> <|im_end|>", "<|im_end|>", "<|begin_of_text|>", tool_use=True),
    "command_r": Family(_COMMAND_R, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", tool_use=True),
    "granite": Family("<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>", "<|end_of_text|>"),
    "kimi_k2": Family(_KIMI, "<|im_end|>", marks=_KIMI_MARKS),
    "kimi_k2_thinking": Family(_KIMI, "<|im_end|>", marks=f"{_KIMI_MARKS} <think> </think>"),
}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, with its template."""
    family = FAMILIES[name]
    backend = _sentencepiece() if family.sentencepiece else byte_level()
    swallowing = family.swallowing.split(" ")
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True, rstrip=text in swallowing)
            for text in family.special.split(" ")
        ]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in family.marks.split(" ") if text])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos)
    template = (_FOLDER / f"{name}.jinja").read_text()
    if family.tool_use:
        made.chat_template = {"default": template, "tool_use": (_FOLDER / f"{name}_tool_use.jinja").read_text()}
    else:
        made.chat_template = template
    return made


def _sentencepiece() -> Tokenizer:
    """Letters with bytes to fall back on, as Llama 2's: each stretch of text begins with a blank of its own."""
    letters = [*map(chr, range(33, 127)), "▁"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    return backend
