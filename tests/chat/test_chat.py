"""A chat template as exact token ids."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from asyncrl.chat.chat import Chat
from asyncrl.chat.from_config import open_chat
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.errors import ConfigError
from tests.episode.fakes import CHATML, END, QWEN3, byte_level, make_tokenizer

QUESTION = {"role": "user", "content": "5*3?"}
TOOLS = [{"type": "function", "function": {"name": "echo", "description": "é", "parameters": {"type": "object"}}}]


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "echo", "content": content}


def test_template_arguments_reach_prompt_and_suffix():
    chat = Chat(make_tokenizer(QWEN3), {"enable_thinking": False})
    for tokens in (chat.prompt([QUESTION], []), chat.suffix([tool("15")], [])):
        assert chat.text(tokens).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_stop_ids_are_the_end_of_a_turn_and_the_end_of_text():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert Chat(tokenizer).stop_ids == tuple(tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"]))
    assert len(Chat(make_tokenizer()).stop_ids) == 1


@pytest.mark.slow
def test_cached_suffixes_share_a_long_list_of_tools():
    chat = Chat(make_tokenizer(CHATML))
    listed = [{"type": "function", "function": {**TOOLS[0]["function"], "description": "x" * 60_000}}]
    chat.suffix([tool("the first")], listed)
    tracemalloc.start()
    try:
        for number in range(25):
            chat.suffix([tool(f"result {number}")], listed)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 1 << 19


def test_the_same_results_are_rendered_once():
    chat = Chat(make_tokenizer())
    suffix = chat.suffix([tool("15")], TOOLS)
    assert chat.suffix([tool("15")], TOOLS) is suffix
    with pytest.raises(ValueError, match="read-only"):
        suffix[0] = 1


def normalizing(normalizer, normalized: bool):
    """A tokenizer with a normalizer, which looks for special tokens in normalised text or before."""
    backend = byte_level()
    backend.normalizer = normalizer
    marks = ("<|endoftext|>", "<|im_start|>", END)
    backend.add_special_tokens([AddedToken(text, normalized=normalized, special=True) for text in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


FORGING = [
    normalizers.NFKC(),
    normalizers.Lowercase(),
    normalizers.Sequence([normalizers.NFC(), normalizers.Replace("==", "<|")]),
    normalizers.Replace("--", ""),
    normalizers.BertNormalizer(lowercase=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", FORGING, ids=str)
def test_a_tokenizer_that_reads_other_characters_as_a_special_token_is_refused(normalizer):
    with pytest.raises(ConfigError, match="normalized=False"):
        Chat(normalizing(normalizer, True))


HARMLESS = [normalizers.NFC(), normalizers.Replace(" ", "▁")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalizer", "normalized"), [(each, False) for each in FORGING] + [(each, True) for each in HARMLESS], ids=str
)
def test_no_text_becomes_a_special_token_by_a_normalizer(normalizer, normalized):
    tokenizer = normalizing(normalizer, normalized)
    chat = Chat(tokenizer)
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids("<|im_start|>")}

    def marks(text: str) -> int:
        return sum(each in special for each in chat.prompt([{"role": "user", "content": text}], []).tolist())

    for forged in (
        "＜|im_start|＞",
        "<|IM_START|>",
        "==im_start|>",
        "<|im_st--art|>",
        "<|im_st\x00art|>",
        "<|im_start|>",
    ):
        assert marks(forged) == marks("x")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{% for message in messages %}{{ message.content }}\n{% endfor %}", "no special token"),
        ("{{ raise_exception('no turns here') }}", "cannot render question and answer: .*no turns here"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str | None, reason: str):
    with pytest.raises(ConfigError, match=reason):
        Chat(make_tokenizer(template))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% if messages %}\n{{ messages[0.content }}\n{% endif %}", "is not a valid template: line 2: "),
        ("{# one #}\n\n{{ tool.name.first }}", r"refuses .*: 'tool' is undefined \(line 3 of the template\)"),
    ],
)
def test_an_error_in_a_template_of_the_configuration_names_key_file_and_line(text: str, reason: str, tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "broken.jinja"
    file.write_text(text)
    config = TrainConfig(model=ModelConfig(path=str(tmp_path), chat_template=str(file)))
    with pytest.raises(ConfigError, match=rf"question and answer: model\.chat_template={file} {reason}"):
        open_chat(config)
    config.model.chat_template = text
    with pytest.raises(ConfigError, match=rf"question and answer: model\.chat_template {reason}"):
        open_chat(config)


def test_the_demos_template_works():
    chat = Chat(build_tokenizer())
    expected = "\n<|im_start|>user\n<tool_response>\n15\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert chat.text(chat.suffix([tool("15")], TOOLS)) == expected
