"""A demonstration has the tokens and the mask of an episode in which the policy said the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ModelConfig, RunConfig, TrainConfig
from asyncrl.data.demonstrations import Demonstration, DemonstrationFile
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import read_rendered
from asyncrl.episode.demonstrations import demonstration_tokens
from asyncrl.episode.from_config import prepare_demonstrations
from asyncrl.errors import DataError, RefusedError, StoppedError
from asyncrl.tools import Tool
from tests.episode.fakes import (
    CHATML,
    END,
    QWEN3,
    ScriptedEngine,
    ids,
    make_ticket,
    make_tokenizer,
    make_tool,
    play_with_tools,
)

USER = {"role": "user", "content": "Wie groß ist 2+2?"}
CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "2+2"}}\n</tool_call>'


def calls(id: str = "") -> dict[str, Any]:
    function = {"name": "echo", "arguments": json.dumps({"text": "2+2"})}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function, "id": id}]}


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize(
    "messages",
    [
        [
            USER,
            calls("a"),
            {"role": "tool", "tool_call_id": "a", "content": "4"},
            {"role": "assistant", "content": "4é"},
        ],
        [USER, calls(), {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4é"}],
    ],
)
def test_the_messages_of_a_rollout_render_as_the_rollout(template: str, messages: Sequence[Mapping[str, Any]]) -> None:
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer, {"enable_thinking": False})

    async def echo(text: str) -> str:
        return "4"

    cls, _ = make_tool(echo)
    engine = ScriptedEngine(tokenizer, [CALL, "4é"])
    trajectory = asyncio.run(play_with_tools(engine, chat, {"echo": cls}, make_ticket(messages=(USER,))))
    tokens, mask = demonstration_tokens(chat, Demonstration(messages), {"echo": cls.schema})
    assert np.array_equal(tokens, trajectory.tokens)
    assert np.array_equal(mask, trajectory.loss_mask)
    learned = "".join(chat.text([token]) if chosen else "|" for token, chosen in zip(tokens, mask, strict=True))
    assert [text for text in chat.text(tokens[mask]).split(END) if text] == [CALL, "4é"], learned


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([USER], "no assistant turn"),
        ([{"role": "assistant", "content": "4"}], "message 0 is an assistant turn, but follows no message"),
        (
            [USER, {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}],
            "message 2 is an assistant",
        ),
        ([USER, {"role": "assistant", "content": f"4{END}5"}], "message 1 contains .* which would end the turn"),
        (
            [USER, {"role": "assistant", "content": "4<|im_start|>user"}],
            r"message 1 contains '<\|im_start\|>', which the chat template writes between turns",
        ),
        (
            [USER, {"role": "assistant", "content": "4", "reasoning_content": "<|im_start|>"}],
            r"message 1 contains '<\|im_start\|>'",
        ),
        ([{"role": "nobody", "content": "4"}], "must have a role"),
        *(
            (
                [USER, {"role": "assistant", "content": content, **more}],
                "message 1 is an assistant turn without content",
            )
            for content in (None, "", [], [{"type": "text", "text": ""}])
            for more in ({}, {"tool_calls": [], "reasoning_content": ""})
        ),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], "image cannot be recorded"),
    ],
)
def test_what_no_policy_could_have_said_is_refused(messages: Sequence[Mapping[str, Any]], why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        demonstration_tokens(Chat(make_tokenizer()), Demonstration(messages), {})


def test_marks_of_turns_in_what_the_policy_reads_are_letters_and_its_own_marks_are_its_tokens() -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "<|im_start|>"}, {"role": "assistant", "content": "<think>2</think>4"}]
    tokens, mask = demonstration_tokens(Chat(tokenizer), Demonstration(messages), {})
    assert ids(tokenizer, "<|im_start|>")[0] not in tokens[3:-10]
    assert Chat(tokenizer).text(tokens[mask]) == f"<think>2</think>4{END}"


def test_a_demonstration_that_calls_a_tool_which_is_not_on_offer_is_refused_with_the_tools_that_are() -> None:
    call = {"type": "function", "function": {"name": "prize", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    offered = {"echo": {"name": "echo", "description": "", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(RefusedError, match=r"message 1 calls the tool prize, and the tools on offer are echo"):
        demonstration_tokens(Chat(make_tokenizer()), Demonstration(messages), offered)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{}", r"message 1 calls the tool add, but argument 'a' is missing$"),
        ('{"a": "one"}', r"argument 'a' must be of type integer$"),
        ('{"a": 1, "c": 2}', r"there is no argument 'c'; there are: a, b$"),
        ('{"a": 1, "b": null}', r"argument 'b' must be of type integer \(Parquet gives every struct all fields"),
        ("[1]", r"message 1 calls the tool add with \[1\]: arguments must be a JSON object"),
    ],
)
def test_a_demonstration_whose_arguments_the_tool_would_refuse_is_refused(arguments: str, why: str) -> None:
    integer = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}]
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RefusedError, match=why):
        demonstration_tokens(Chat(make_tokenizer()), Demonstration(messages, tools), {})


def test_what_follows_the_last_assistant_turn_is_left_away() -> None:
    chat = Chat(make_tokenizer())
    whole = [USER, {"role": "assistant", "content": "4"}]
    for tokens, longer in zip(
        demonstration_tokens(chat, Demonstration(whole), {}),
        demonstration_tokens(chat, Demonstration([*whole, USER]), {}),
        strict=True,
    ):
        assert np.array_equal(tokens, longer)


def test_assistant_turns_of_a_prompt_are_context_and_only_the_response_is_learned(tmp_path: Path) -> None:
    prompt = [
        USER,
        {"role": "assistant", "content": f"WRONG{END}"},
        {"role": "user", "content": "fix it"},
    ]
    says = {"role": "assistant", "content": "RIGHT"}
    (tmp_path / "shown.jsonl").write_text(json.dumps({"prompt": prompt, "response": "RIGHT"}))
    (shown,) = DemonstrationFile([tmp_path / "shown.jsonl"])
    chat = Chat(make_tokenizer(CHATML))
    tokens, mask = demonstration_tokens(chat, shown, {})
    assert chat.text(tokens[mask]) == f"RIGHT{END}"
    assert np.array_equal(tokens[~mask], chat.prompt(prompt, [])), "the prompt is that of a task"
    prompt[1] = {"role": "assistant", "content": "WRONG"}
    tokens, mask = demonstration_tokens(chat, Demonstration([*prompt, says]), {})
    assert chat.text(tokens[mask]) == f"WRONG{END}RIGHT{END}"


def test_a_call_in_a_prompt_is_not_checked_and_a_response_after_an_assistant_turn_is_refused() -> None:
    chat, says = Chat(make_tokenizer(CHATML)), {"role": "assistant", "content": "4"}
    messages = [USER, calls("a"), {"role": "tool", "tool_call_id": "a", "content": "4"}, says]
    other = {"add": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}
    _, mask = demonstration_tokens(chat, Demonstration(messages, context=3), other)
    assert mask.sum() == len(ids(make_tokenizer(CHATML), f"4{END}"))
    with pytest.raises(RefusedError, match="message 2 is an assistant turn, but follows no message"):
        demonstration_tokens(chat, Demonstration([USER, says, says], context=2), {})


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Three demonstrations, of which the second one is longer than 40 tokens, and has an answer within these."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    lines = [("1+2", "3"), ("1+2", "3" * 60), ("1+2" * 30, "3")]
    rows = (json.dumps({"prompt": prompt, "response": response}) for prompt, response in lines)
    (tmp_path / "shown.jsonl").write_text("\n".join(rows))
    config = TrainConfig(model=ModelConfig(path=str(tmp_path / "model")), run=RunConfig(dir=str(tmp_path), name="run"))
    config.algorithm.sft.path = [str(tmp_path / "shown.jsonl")]
    config.algorithm.sft.max_tokens, config.actor.tools = 40, []
    return config


def test_long_demonstrations_are_refused_cut_or_left_out_and_counted(config: TrainConfig) -> None:
    sources = config.algorithm.sft.path
    assert sources
    with pytest.raises(
        DataError, match=r"shown.jsonl: line 2, column response: it has \d+ tokens, and the limit is 40"
    ):
        prepare_demonstrations(config, sources)
    config.algorithm.sft.overlong = "leave_out"
    left = prepare_demonstrations(config, sources)
    assert (len(left), left.cut, left.left_out) == (1, 0, 2)
    config.algorithm.sft.overlong = "cut"
    cut = prepare_demonstrations(config, sources)
    assert (len(cut), cut.cut, cut.left_out) == (2, 1, 1)
    assert cut.lengths.max() == 40
    config.algorithm.sft.max_tokens = 3
    with pytest.raises(DataError, match="all 3 demonstrations have more than 3 tokens"):
        prepare_demonstrations(config, sources)


def test_demonstrations_are_rendered_once(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config.algorithm.sft.overlong = "cut"
    sources = config.algorithm.sft.path
    assert sources
    written = prepare_demonstrations(config, sources)
    monkeypatch.setattr("asyncrl.episode.from_config.open_chat", None)
    assert prepare_demonstrations(config, sources).digest == written.digest
    found = read_rendered(run_demonstrations(config).folder(sources))
    first = ids(make_tokenizer(CHATML), f"<|im_start|>user\n1+2{END}\n<|im_start|>assistant\n3{END}")
    assert np.array_equal(found.row(0)[0][-len(first) :], first)
    assert found.row(0)[1].sum() == 2


@pytest.mark.parametrize("what", ["shown.jsonl", "model/chat_template.jinja"])
def test_a_file_that_changes_and_keeps_its_size_is_rendered_again(what: str, config: TrainConfig) -> None:
    config.algorithm.sft.overlong = "cut"
    sources = config.algorithm.sft.path
    assert sources
    before, folder = prepare_demonstrations(config, sources), run_demonstrations(config).folder(sources)
    changed = Path(config.run.dir) / what
    changed.write_text(changed.read_text().replace("1+2", "3+4").replace("im_start", "im_strat"))
    assert run_demonstrations(config).folder(sources) == folder
    assert prepare_demonstrations(config, sources).digest != before.digest
    assert read_rendered(folder).digest == prepare_demonstrations(config, sources).digest


def test_a_changed_file_of_the_chat_template_is_rendered_again(config: TrainConfig, tmp_path: Path) -> None:
    config.algorithm.sft.overlong = "cut"
    sources = config.algorithm.sft.path
    assert sources
    written = (Path(config.run.dir) / "model" / "chat_template.jinja").read_text()
    template = tmp_path / "own.jinja"
    template.write_text(written)
    config.model.chat_template = str(template)
    before = prepare_demonstrations(config, sources)
    template.write_text(written.replace("im_start", "im_strat"))
    assert prepare_demonstrations(config, sources).digest != before.digest


class OwnTool(Tool):
    """A tool of the user."""

    schema = {"name": "own", "description": "Says it.", "parameters": {"type": "object"}}  # noqa: RUF012


def test_a_changed_schema_of_an_own_tool_is_rendered_again(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.algorithm.sft.overlong, config.algorithm.sft.max_tokens = "cut", 400
    config.actor.tools = [f"{__name__}.OwnTool"]
    sources = config.algorithm.sft.path
    assert sources
    before = prepare_demonstrations(config, sources)
    monkeypatch.setitem(OwnTool.schema, "description", "Says it again.")
    assert prepare_demonstrations(config, sources).digest != before.digest


def test_a_rendering_of_an_older_format_is_not_read(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = config.algorithm.sft.path
    assert sources
    folder = run_demonstrations(config).folder(sources)
    monkeypatch.setattr("asyncrl.data.rendered.FORMAT", 1)
    assert run_demonstrations(config).folder(sources) != folder


def test_rendered_demonstrations_that_are_damaged_are_rendered_again(config: TrainConfig) -> None:
    config.algorithm.sft.overlong = "cut"
    sources = config.algorithm.sft.path
    assert sources
    before = prepare_demonstrations(config, sources)
    (run_demonstrations(config).folder(sources) / "tokens.npy").write_bytes(b"half")
    assert prepare_demonstrations(config, sources).digest == before.digest


def test_a_stop_ends_the_rendering(config: TrainConfig) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="while demonstrations were rendered"):
        prepare_demonstrations(config, config.algorithm.sft.path or [], stop)
