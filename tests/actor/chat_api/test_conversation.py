"""Whatever is asked, answered and withdrawn in whatever order: the limits hold, and branches are what was asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.branch import joined
from asyncrl.actor.chat_api.conversation import Conversation, ConversationLimits, LimitError, Place
from asyncrl.actor.chat_api.messages import answer_message, read_answer, read_ask
from asyncrl.actor.engine.base import Generation
from asyncrl.errors import BusyError
from asyncrl.types import Role
from tests.actor.fakes import CHATML, END, ids, make_tokenizer

TOKENIZER = make_tokenizer(CHATML)
CHAT = Chat(TOKENIZER)
LIMITS = ConversationLimits(max_turns=6, max_turn_tokens=100, max_tokens=150, max_total_tokens=400)

ACTS = st.lists(st.tuples(st.sampled_from(["ask", "ask", "answer", "withdraw"]), st.integers(0, 20)), max_size=30)


def state(conversation: Conversation) -> Any:
    branches = [(branch.name, branch.tokens.tolist(), list(branch.turns)) for branch in conversation.branches]
    return branches, conversation.answers, [branch.reserved for branch in conversation.branches]


def answer(conversation: Conversation, place: Place, text: str) -> tuple[list[int], list[int]]:
    """Record an answer; returns what stood before it, and the answer."""
    before, sampled = place.branch.tokens.tolist(), ids(TOKENIZER, text + END)[: place.branch.reserved]
    finish = "stop" if text + END == CHAT.text(sampled) else "length"
    values = np.full(len(sampled), -0.5, np.float32), np.zeros(len(sampled), np.int32)
    generation = Generation(np.asarray(sampled, np.int32), *values, finish)
    conversation.record(place, generation, read_answer(answer_message(text, [])), [])
    return before, list(sampled)


@settings(max_examples=200)
@given(ACTS)
def test_limits_hold_and_every_answer_stands_once_behind_what_was_asked(acts: list[tuple[str, int]]) -> None:
    conversation = Conversation("t", CHAT, LIMITS)
    histories: list[list[Any]] = [[]]
    under_way: list[Place] = []
    answered: list[tuple[list[int], list[int]]] = []
    names: list[str] = []
    for number, (act, pick) in enumerate(acts):
        if act == "ask":
            messages = [*histories[pick % len(histories)], {"role": "user", "content": f"question {pick % 3}"}]
            known = {branch.name for branch in conversation.branches}
            try:
                under_way.append(conversation.prepare(read_ask({"messages": messages})))
            except BusyError:
                assert under_way
            except LimitError:
                assert conversation.truncated
            names += [branch.name for branch in conversation.branches if branch.name not in known]
        elif under_way:
            place = under_way.pop(pick % len(under_way))
            if act == "answer":
                text = f"answer {number}"
                answered.append(answer(conversation, place, text))
                histories.append([*place.ask.messages, {"role": "assistant", "content": text}])
            else:
                conversation.withdraw(place)
        taken = [len(branch.tokens) + branch.reserved for branch in conversation.branches]
        assert sum(taken) <= LIMITS.max_total_tokens
        assert max(taken, default=0) <= LIMITS.max_tokens
        assert conversation.answers + len(under_way) <= LIMITS.max_turns
        assert {branch for branch in conversation.branches if branch.reserved} == {each.branch for each in under_way}
    assert len(set(names)) == len(names)
    branches = conversation.answered()
    found = [
        (branch.tokens[: turn.start].tolist(), branch.tokens[turn.start : turn.end].tolist())
        for branch in branches
        for turn in branch.turns
        if turn.role is Role.ASSISTANT
    ]
    assert sorted(found) == sorted(answered)
    if branches:
        assert joined(branches).tokens[-len(answered[-1][1]) :].tolist() == answered[-1][1]


@given(st.integers(0, 3))
def test_a_request_that_is_withdrawn_changes_nothing(rounds: int) -> None:
    conversation = Conversation("t", CHAT, LIMITS)
    messages: list[Any] = []
    for number in range(rounds):
        messages.append({"role": "user", "content": "go on"})
        answer(conversation, conversation.prepare(read_ask({"messages": messages})), f"{number}")
        messages.append({"role": "assistant", "content": f"{number}"})
    before = state(conversation)
    again = [*messages, {"role": "user", "content": "once more"}]
    for wanted in (again, again, [{"role": "user", "content": "new"}]):
        place = conversation.prepare(read_ask({"messages": wanted}))
        ended = conversation.withdraw(place)
        assert (ended is None) == (place.branch in conversation.branches)
        assert state(conversation) == before
    if rounds:
        assert conversation.prepare(read_ask({"messages": again})).branch.name == "t/1"


def test_a_refusal_is_forgiven_by_an_answer_to_what_was_asked_after_it_and_by_no_other() -> None:
    conversation = Conversation("t", CHAT, LIMITS)
    early = conversation.prepare(read_ask({"messages": [{"role": "user", "content": "one"}], "max_tokens": 5}))
    with pytest.raises(LimitError, match="max_total_tokens"):
        conversation.prepare(read_ask({"messages": [{"role": "user", "content": "word " * 60}]}))
    answer(conversation, early, "a")
    assert conversation.truncated
    answer(conversation, conversation.prepare(read_ask({"messages": [{"role": "user", "content": "two"}]})), "b")
    assert not conversation.truncated
