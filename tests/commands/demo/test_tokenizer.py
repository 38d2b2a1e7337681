"""The demo's tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.commands.demo.arithmetic import Expression, opening
from asyncrl.commands.demo.tokenizer import END_OF_TURN, build_tokenizer
from asyncrl.commands.demo.transcripts import TOOLS, call

TOKENIZER = build_tokenizer()
EXPRESSION = Expression((7, 5, 3, 8), ("+", "*", "-"))
texts = st.text(st.characters(exclude_categories=["Cs"]))
messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda text: {"role": "assistant", "content": text}, texts),
    st.builds(lambda text: call("*", text), texts),
)


def render(conversation: list[dict[str, Any]], **options: Any) -> str:
    return TOKENIZER.apply_chat_template(conversation, tools=TOOLS, tokenize=False, **options)


def token_ids(conversation: list[dict[str, Any]], **options: Any) -> list[int]:
    return TOKENIZER.apply_chat_template(conversation, tools=TOOLS, return_dict=False, **options)


@given(texts)
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_digits_and_operators_are_tokens_of_their_own() -> None:
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER("17+5*-38")["input_ids"]) == list("17+5*-38")


def test_a_saved_folder_is_the_same_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token == END_OF_TURN
    assert loaded.pad_token_id not in (None, loaded.eos_token_id)
    assert loaded.apply_chat_template(opening(EXPRESSION), tools=TOOLS, return_dict=False) == token_ids(
        opening(EXPRESSION)
    )


def test_the_template_is_of_qwens_form_and_tool_results_share_a_turn() -> None:
    results = [{"role": "tool", "content": "7+15-8"}, {"role": "tool", "content": "2"}]
    conversation = [*opening(EXPRESSION), call("*", "7+5*3-8"), *results]
    assert render(conversation, add_generation_prompt=True) == (
        "<|im_start|>system\nWork out the expression with the calculator, one operation a call.\n\n"
        "# Tools\ncalculator(operator, expression)<|im_end|>\n"
        "<|im_start|>user\n7+5*3-8<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": '
        '{"operator": "*", "expression": "7+5*3-8"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7+15-8\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_is_a_few_tokens() -> None:
    before = token_ids(opening(EXPRESSION), add_generation_prompt=True)
    after = token_ids([*opening(EXPRESSION), call("*", str(EXPRESSION))])
    assert len(before) < 30
    assert len(after) - len(before) == len("*") + len("7+5*3-8") + 5


@settings(max_examples=50)
@given(st.lists(messages, max_size=5), messages)
def test_a_conversation_is_a_token_prefix_of_the_longer_one(
    conversation: list[dict[str, Any]], following: dict[str, Any]
) -> None:
    shorter, longer = [*opening(EXPRESSION), *conversation], [*opening(EXPRESSION), *conversation, following]
    start = token_ids(shorter, add_generation_prompt=following["role"] == "assistant")
    assert token_ids(longer)[: len(start)] == start


@pytest.mark.parametrize(
    "arguments", [{"operator": "+", "expression": "1+2"}, '{"operator": "+", "expression": "1+2"}']
)
def test_arguments_come_as_values_or_as_json_text(arguments: Any) -> None:
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": arguments}}]}
    assert render([*opening(EXPRESSION), turn]) == render([*opening(EXPRESSION), call("+", "1+2")])
