"""Limits hold and branches are exact, in any order of requests, records and cancellations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat.chat import Chat
from asyncrl.chat.prompt_lengths import cut_prompt
from asyncrl.chat.template import QUESTION, answer
from asyncrl.engine.base import Generation
from asyncrl.episode.limits import EpisodeLimits, LimitError
from asyncrl.episode.recorder import CompletionRequest, Recorder, Reservation
from asyncrl.errors import BusyError, EngineError, InvariantError
from asyncrl.types import Finish, Role, Trajectory
from tests.episode.fakes import CHATML, END, ids, make_ticket, make_tokenizer

TOKENIZER = make_tokenizer(CHATML)
CHAT = Chat(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=6, max_turn_tokens=100, max_tokens=150, max_total_tokens=400)

ACTS = st.lists(st.tuples(st.sampled_from(["ask", "rewrite", "answer", "cancel"]), st.integers(0, 20)), max_size=30)


def new_recorder() -> Recorder:
    return Recorder(make_ticket("t"), LIMITS, CHAT)


def reserve(recorder: Recorder, messages: list[Any], max_tokens: int | None = None) -> Reservation:
    return recorder.reserve(CompletionRequest(tuple(messages), (), max_tokens))


def record(recorder: Recorder, reservation: Reservation, text: str) -> tuple[list[int], list[int]]:
    """Record an answer. Returns the tokens before it, and the answer's."""
    before = reservation.branch.tokens.tolist()
    sampled = ids(TOKENIZER, text + END)[: reservation.branch.reserved]
    finish = "stop" if text + END == CHAT.text(sampled) else "length"
    recorder.record(reservation, generation(sampled, finish), answer(text), [])
    return before, sampled.tolist()


def finished(recorder: Recorder) -> Trajectory:
    return recorder.trajectory({}, {}, "turn")


def state(recorder: Recorder) -> Any:
    branches = [(each.session, each.tokens.tolist(), list(each.turns), each.reserved) for each in recorder.branches]
    return branches, list(recorder.completions), recorder.truncated


def generation(tokens: Any, finish: str = "stop") -> Generation:
    count = len(tokens)
    return Generation(np.asarray(tokens, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32), finish)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.slow
@settings(max_examples=200)
@given(ACTS)
def test_limits_hold_and_every_answer_stands_once_behind_what_was_asked(acts: list[tuple[str, int]]) -> None:
    recorder = new_recorder()
    histories: list[list[Any]] = [[]]
    in_flight: list[Reservation] = []
    answered: list[tuple[list[int], list[int]]] = []
    sessions: list[str] = []
    for number, (act, pick) in enumerate(acts):
        if act in ("ask", "rewrite"):
            history = histories[pick % len(histories)]
            if act == "rewrite" and history:
                history = [*history[:-1], answer("rewritten")]
            known = {branch.session for branch in recorder.branches}
            try:
                in_flight.append(reserve(recorder, [*history, user(f"question {pick % 3}")]))
            except BusyError:
                assert in_flight
            except LimitError:
                assert recorder.truncated
            sessions += [branch.session for branch in recorder.branches if branch.session not in known]
        elif in_flight:
            reservation = in_flight.pop(pick % len(in_flight))
            if act == "answer":
                text = f"answer {number}"
                answered.append(record(recorder, reservation, text))
                histories.append([*reservation.request.messages, answer(text)])
            else:
                recorder.cancel(reservation)
        taken = [len(branch) + branch.reserved for branch in recorder.branches]
        assert sum(taken) <= LIMITS.max_total_tokens
        assert max(taken, default=0) <= LIMITS.max_tokens
        assert len(recorder.completions) + len(in_flight) <= LIMITS.max_turns
        assert {each for each in recorder.branches if each.reserved} == {each.branch for each in in_flight}
    assert len(set(sessions)) == len(sessions)
    if not answered:
        with pytest.raises(InvariantError, match="before any request"):
            finished(recorder)
        return
    trajectory = finished(recorder)
    found = [
        (trajectory.tokens[start : turn.start].tolist(), trajectory.tokens[turn.start : turn.end].tolist())
        for start, end in trajectory.branches
        for turn in trajectory.turns
        if turn.role is Role.ASSISTANT and start <= turn.start < end
    ]
    assert sorted(found) == sorted(answered)
    assert trajectory.sampled_tokens == sum(len(sampled) for _, sampled in answered)
    assert trajectory.tokens[-len(answered[-1][1]) :].tolist() == answered[-1][1]


@given(st.integers(0, 3))
def test_a_request_that_is_cancelled_changes_nothing(rounds: int) -> None:
    recorder = new_recorder()
    messages: list[Any] = []
    for number in range(rounds):
        messages.append(user("go on"))
        record(recorder, reserve(recorder, messages), f"{number}")
        messages.append(answer(f"{number}"))
    before = state(recorder)
    again = [*messages, user("once more")]
    for wanted in (again, again, [user("new")]):
        reservation = reserve(recorder, wanted)
        ended = recorder.cancel(reservation)
        assert (ended is None) == (reservation.branch in recorder.branches)
        assert state(recorder) == before
    if rounds:
        assert reserve(recorder, again).branch.session == "t/1"


def test_a_refusal_is_forgiven_by_an_answer_to_a_later_request_only() -> None:
    recorder = new_recorder()
    early = reserve(recorder, [user("one")], max_tokens=5)
    with pytest.raises(LimitError, match=r"actor\.max_tokens"):
        reserve(recorder, [user("word " * 60)])
    record(recorder, early, "a")
    assert finished(recorder).finish is Finish.TRUNCATED
    record(recorder, reserve(recorder, [user("two")]), "b")
    assert finished(recorder).finish is Finish.COMPLETED


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        (generation([]), "aborted"),
        (generation([1], "abort"), "aborted"),
        (generation(range(6)), "gave 6 tokens of at most 5"),
        (generation([1], "tired"), "finish reason 'tired'"),
    ],
)
def test_a_completion_that_the_engine_did_not_finish_as_promised_is_not_recorded(sampled: Generation, reason: str):
    recorder = new_recorder()
    reservation = reserve(recorder, [QUESTION], max_tokens=5)
    before = state(recorder)
    with pytest.raises(EngineError, match=reason):
        recorder.record(reservation, sampled, answer(""), [])
    assert state(recorder) == before


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_first_prompt_that_is_too_long_is_cut_and_the_episode_goes_on_behind_it(truncation: str) -> None:
    limits = replace(LIMITS, max_prompt_length=20, truncation=truncation)
    recorder, question = Recorder(make_ticket("t"), limits, CHAT), user("why? " * 20)
    before, sampled = record(recorder, reserve(recorder, [question]), "so")
    assert before == cut_prompt(CHAT.prompt([question], []), 20, truncation).tolist()
    again, _ = record(recorder, reserve(recorder, [question, answer("so"), QUESTION]), "well")
    assert again[: len(before) + len(sampled)] == before + sampled
    assert len(recorder.branches) == 1


def test_a_first_prompt_that_is_too_long_ends_the_episode_if_nothing_may_be_cut() -> None:
    recorder = Recorder(make_ticket("t"), replace(LIMITS, max_prompt_length=20), CHAT)
    with pytest.raises(LimitError, match=r"maximum context length is data\.max_prompt_length=20"):
        reserve(recorder, [user("why? " * 20)])
    assert len(recorder.branches) == 0
