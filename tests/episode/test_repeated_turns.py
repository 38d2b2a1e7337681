"""A branch whose prompt repeats turns of the policy has their calls, and continues the candidate that is meant."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.messages import read_messages
from asyncrl.chat.template import QUESTION, TOOL, result
from asyncrl.engine.base import Generation
from asyncrl.episode.completions import message_of
from asyncrl.episode.recorder import CompletionRequest, Recorder, Reservation
from asyncrl.scoring.rules.tool_calls import tool_calls
from asyncrl.types import ToolCall
from tests.episode.fakes import CHATML, END, LIMITS, QWEN3, ids, make_ticket, make_tokenizer

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"mark": "x"}}\n</tool_call>'
EXPECTED = [{"name": "lookup", "arguments": {"mark": "x"}}]


class Episode:
    def __init__(self, template: str, as_rendered: bool = False) -> None:
        self.tokenizer = make_tokenizer(template)
        self.chat = Chat(self.tokenizer)
        self.recorder = Recorder(make_ticket("t"), LIMITS, self.chat, as_rendered)

    def ask(self, messages: list[Any], text: str) -> Any:
        """The message of the policy's turn `text`, which answers `messages`."""
        return self.record(self.recorder.reserve(CompletionRequest(tuple(messages), (TOOL,))), text)

    def record(self, reservation: Reservation, text: str) -> Any:
        turn = self.chat.parse_apart(text, {"lookup": TOOL["function"]})
        tokens = ids(self.tokenizer, text + END)
        count = len(tokens)
        sampled = Generation(tokens, np.full(count, -0.5, np.float32), np.zeros(count, np.int32), "stop")
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        self.recorder.record(reservation, sampled, message_of(turn), calls)
        return message_of(turn)

    def score(self, **options: Any) -> float:
        task = replace(make_ticket("t").task, ground_truth=json.dumps(EXPECTED))
        trajectory = self.recorder.trajectory({}, {}, "turn")
        return tool_calls(task=task, answer="", trajectory=trajectory, **options)["score"]


@pytest.mark.parametrize("as_rendered", [False, True])
def test_a_branch_that_a_template_rewrites_knows_the_calls_that_it_repeats(as_rendered: bool) -> None:
    episode, messages = Episode(QWEN3, as_rendered), [QUESTION]
    messages += [episode.ask(messages, f"<think>\nhm\n</think>\n\n{CALL}"), result("15")]
    messages += [episode.ask(messages, "<think>\nok\n</think>\n\nIt is 15."), {"role": "user", "content": "sure?"}]
    episode.ask(messages, "<think>\nyes\n</think>\n\nYes.")
    assert len(episode.recorder.branches) == 1 + as_rendered
    assert episode.score() == episode.score(every_branch=True) == 1.0


def test_a_branch_after_another_system_message_knows_the_calls_that_it_repeats_in_their_order() -> None:
    episode, messages = Episode(CHATML), [{"role": "system", "content": "12:00"}, QUESTION]
    first = episode.ask(messages, CALL)
    messages += [first, result("15")]
    second = episode.ask(messages, CALL.replace('"x"', '"y"'))
    later = [{"role": "system", "content": "12:01"}, QUESTION, first, result("15"), second, result("16"), first]
    episode.ask([*later, result("15")], "Done.")
    prompt = episode.recorder.trajectory({}, {}, "turn").turns[-2]
    assert [call.arguments["mark"] for call in prompt.tool_calls] == ["x", "y", "x"]


def test_calls_that_the_policy_did_not_make_are_not_its_calls() -> None:
    episode = Episode(CHATML)
    shown = message_of(episode.chat.parse_apart(CALL, {"lookup": TOOL["function"]}))
    episode.ask([QUESTION], "I do not know.")
    episode.ask([QUESTION, shown, result("15"), QUESTION], "It is 15.")
    assert episode.score() == episode.score(every_branch=True) == 0.0


def test_a_call_before_two_candidates_counts_once() -> None:
    episode, messages = Episode(CHATML), [QUESTION]
    messages += [episode.ask(messages, CALL), result("15")]
    for text in ("It is 15.", "15!"):
        episode.ask(messages, text)
    assert episode.score() == episode.score(every_branch=True) == 1.0


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("template", [QWEN3, CHATML])
def test_of_candidates_with_one_content_the_one_whose_thoughts_are_repeated_goes_on(template: str, kept: int) -> None:
    episode = Episode(template)
    reservations = episode.recorder.reserve_all(CompletionRequest((QUESTION,), (TOOL,)), 2)
    thoughts = ("a good proof", "a bad guess")
    made = [
        episode.record(each, f"<think>\n{thought}\n</think>\n\n15")
        for each, thought in zip(reservations, thoughts, strict=True)
    ]
    following = [{"role": "user", "content": "and then?"}]
    for repeated, expected in ((made[kept], kept), ({"role": "assistant", "content": "15"}, 1)):
        read = episode.chat.with_thoughts(read_messages([QUESTION, repeated, *following]))
        reservation = episode.recorder.reserve(CompletionRequest(read, (TOOL,)))
        assert thoughts[expected] in episode.chat.text(reservation.branch.tokens)
        episode.recorder.cancel(reservation)
