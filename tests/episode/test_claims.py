"""An agent's account of its tokens is followed where it is true, and refused at the first token where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.base import Generation
from asyncrl.episode.claims import ClaimedSequence, follow
from asyncrl.episode.recorder import CompletionRequest, Recorder
from asyncrl.errors import RefusedError
from asyncrl.types import Finish, Role, Trajectory
from tests.episode.fakes import make_ticket
from tests.episode.test_recorder import CHAT, LIMITS

TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=4)
"""Few different tokens, so that sequences often have a prefix in common."""


def ask(recorder: Recorder, prompt: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Record a completion of `prompt`; each of its tokens has a log-prob of its own. Returns the whole sequence."""
    tokens = np.asarray(prompt, np.int32)
    reservation = recorder.reserve(CompletionRequest((), (), tokens=tokens))
    assert reservation.branch.tokens.tolist() == list(prompt)
    count, known = len(sampled), 10 * len(recorder.completions)
    logprobs = -np.arange(known, known + count, dtype=np.float32) - 1
    versions = np.full(count, len(recorder.completions), np.int32)
    generation = Generation(np.asarray(sampled, np.int32), logprobs, versions, "stop")
    recorder.record(reservation, generation, {"role": "assistant", "content": ""}, [])
    return [*prompt, *sampled]


def claim(tokens: Sequence[int], sampled: Sequence[Any], logprobs: Sequence[float] | None = None) -> ClaimedSequence:
    given = None if logprobs is None else np.asarray(logprobs, np.float32)
    return ClaimedSequence(np.asarray(tokens, np.int32), np.asarray(sampled, np.bool_), given)


def finished(recorder: Recorder) -> Trajectory:
    return recorder.trajectory({}, {}, "turn")


def new_recorder() -> Recorder:
    return Recorder(make_ticket("t"), LIMITS, CHAT)


def test_a_request_in_tokens_continues_the_longest_completion_with_which_it_begins() -> None:
    recorder = new_recorder()
    first = ask(recorder, [1, 2], [3])
    second = ask(recorder, [*first, 9], [4])
    ask(recorder, [*second], [5])
    ask(recorder, [*first, 8], [6])
    ask(recorder, [7, 7], [1])
    assert [branch.tokens.tolist() for branch in recorder.branches] == [
        [1, 2, 3, 9, 4, 5],
        [1, 2, 3, 8, 6],
        [7, 7, 1],
    ]
    trajectory = finished(recorder)
    assert np.flatnonzero(trajectory.loss_mask).tolist() == [2, 4, 5, 10, 13]


def test_of_equal_sequences_the_one_that_can_grow_is_continued() -> None:
    recorder = new_recorder()
    first = ask(recorder, [1, 2], [3])
    ask(recorder, [1, 2], [3])
    ask(recorder, [*first, 9], [4])
    ask(recorder, [*first, 8], [4])
    assert [branch.tokens.tolist() for branch in recorder.branches] == [[1, 2, 3, 9, 4], [1, 2, 3, 8, 4]]


def test_a_sequence_that_ends_earlier_cuts_its_branch_and_no_other() -> None:
    recorder = new_recorder()
    first = ask(recorder, [1, 2], [3, 4])
    ask(recorder, [*first, 9], [5, 6, 7])
    ask(recorder, [7], [8])
    assert follow(recorder, claim([1, 2, 3, 4, 9, 5], [0, 0, 1, 1, 0, 1])) == 1
    trajectory = finished(recorder)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 9, 5]
    assert trajectory.finish is Finish.TRUNCATED
    assert [turn.finish_reason for turn in trajectory.turns if turn.role is Role.ASSISTANT] == [
        "stop",
        "length",
    ]


def test_candidates_that_an_agent_does_not_return_are_not_trained() -> None:
    recorder = new_recorder()
    for sampled in ([3, 4], [3, 5], [6], [3, 5]):
        ask(recorder, [1, 2], sampled)
    assert follow(recorder, claim([1, 2, 3, 5], [0, 0, 1, 1])) == 3
    trajectory = finished(recorder)
    assert trajectory.tokens.tolist() == [1, 2, 3, 5]
    assert trajectory.logprobs.tolist() == [0, 0, -11, -12]
    assert trajectory.finish is Finish.COMPLETED


def test_of_a_completion_that_an_agent_shortens_only_the_rest_is_trained() -> None:
    recorder = new_recorder()
    ask(recorder, [1, 2], [3, 4])
    ask(recorder, [1, 2, 3, 9], [5])
    assert follow(recorder, claim([1, 2, 3, 9, 5], [0, 0, 1, 0, 1])) == 0
    trajectory = finished(recorder)
    assert trajectory.tokens.tolist() == [1, 2, 3, 1, 2, 3, 9, 5]
    assert np.flatnonzero(trajectory.loss_mask).tolist() == [2, 7]


@pytest.mark.parametrize("after", [[], [9]])
def test_a_sequence_that_ends_before_a_completion_leaves_it_out(after: list[int]) -> None:
    recorder = new_recorder()
    first = ask(recorder, [1, 2], [3, 4])
    ask(recorder, [*first, 9], [5])
    assert follow(recorder, claim([1, 2, 3, 4, *after], [0, 0, 1, 1, *[0] * len(after)])) == 1
    trajectory = finished(recorder)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4]
    assert trajectory.finish is Finish.COMPLETED


def test_equal_tokens_of_two_branches_may_have_either_log_prob() -> None:
    for logprobs in ([-1, -2], [-11, -12]):
        recorder = new_recorder()
        ask(recorder, [1], [3, 4])
        ask(recorder, [1], [3, 4])
        follow(recorder, claim([1, 3, 4], [0, 1, 1], [0, *logprobs]))
        assert finished(recorder).logprobs.tolist() == [0, *logprobs]
    recorder = new_recorder()
    ask(recorder, [1], [3, 4])
    with pytest.raises(RefusedError, match="position 2 is given as -3"):
        follow(recorder, claim([1, 3, 4], [0, 1, 1], [0, -1, -3]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_trained_was_sampled_and_claimed_and_no_claim_makes_more(data: st.DataObject) -> None:
    recorder = new_recorder()
    sequences = [[1]]
    for _ in range(data.draw(st.integers(1, 4))):
        before = data.draw(st.sampled_from(sequences))
        sequences.append(
            ask(recorder, [*before, *data.draw(st.lists(st.integers(1, 3), max_size=2))], data.draw(TOKENS))
        )
    whole = finished(recorder)
    logprobs = {float(each) for each in whole.logprobs}
    tokens = list(data.draw(st.sampled_from(sequences[1:])))
    tokens = tokens[: data.draw(st.integers(1, len(tokens)))]
    if data.draw(st.booleans()):
        tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(st.integers(1, 3))
    sampled = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    known = _known(recorder, tokens)
    try:
        follow(recorder, claim(tokens, sampled))
    except RefusedError:
        assert not any(sampled) or any(each and not there for each, there in zip(sampled, known, strict=True))
        return
    assert all(there for each, there in zip(sampled, known, strict=True) if each)
    trajectory = finished(recorder)
    assert {float(each) for each in trajectory.logprobs} <= logprobs
    trained = np.zeros(len(tokens), int)
    for start, end in trajectory.branches:
        assert trajectory.tokens[start:end].tolist() == tokens[: end - start]
        trained[: end - start] += trajectory.loss_mask[start:end]
    assert trained.tolist() == [int(each) for each in sampled]


def _known(recorder: Recorder, tokens: list[int]) -> list[bool]:
    """True for each token that some completion sampled after exactly the tokens before it."""
    found = [False] * len(tokens)
    for each in recorder.completions:
        recorded = each.tokens.tolist()
        for at in range(each.turn.start, min(len(recorded), len(tokens))):
            found[at] = found[at] or recorded[: at + 1] == tokens[: at + 1]
    return found
