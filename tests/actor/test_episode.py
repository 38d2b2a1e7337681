"""The state machine of an episode: pure transitions and one token sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.episode import Episode, EpisodeFailed, Limits, State
from asyncrl.actor.parsing import MalformedCall
from asyncrl.errors import InvariantError
from asyncrl.types import Finish, Role, ToolCall
from tests.actor.fakes import make_ticket

CALL = ToolCall("echo", {"text": "a"})
BROKEN = MalformedCall("Error: broken.")


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def generation(count: int, finish: str = "stop", first: int = 100, version: int = 5) -> Generation:
    logprobs = np.full(count, -0.25, np.float32)
    return Generation(tokens(count, first), logprobs, np.full(count, version, np.int32), finish)


def started(max_turns: int = 3, max_turn_tokens: int = 10, max_tokens: int = 40, prompt: int = 5) -> Episode:
    episode = Episode(Limits(max_turns, max_turn_tokens, max_tokens))
    episode.start(tokens(prompt))
    return episode


def test_a_conversation_is_one_token_sequence():
    episode = started()
    assert episode.generated(generation(4), [CALL, BROKEN]) is State.TOOL_CALLING
    episode.answered(tokens(3, 50))
    assert episode.generated(generation(2, first=200, version=6), []) is State.COMPLETED
    trajectory = episode.trajectory(make_ticket(), (), {"echo": 1.0}, {})
    assert trajectory.tokens.tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103, 50, 51, 52, 200, 201]
    assert trajectory.loss_mask.tolist() == [False] * 5 + [True] * 4 + [False] * 3 + [True] * 2
    assert trajectory.versions.tolist() == [-1] * 5 + [5] * 4 + [-1] * 3 + [6] * 2
    assert [(turn.start, turn.end, turn.role, turn.finish_reason) for turn in trajectory.turns] == [
        (0, 5, Role.PROMPT, ""),
        (5, 9, Role.ASSISTANT, "stop"),
        (9, 12, Role.TOOL, ""),
        (12, 14, Role.ASSISTANT, "stop"),
    ]
    assert trajectory.turns[1].tool_calls == (CALL,)
    assert trajectory.finish is Finish.COMPLETED


def test_a_cut_turn_ends_the_episode_and_nothing_is_added_to_it():
    episode = started()
    assert episode.generated(generation(10, "length"), []) is State.TRUNCATED
    trajectory = episode.trajectory(make_ticket(), (), {}, {})
    assert (len(trajectory), trajectory.finish) == (15, Finish.TRUNCATED)


def test_the_last_allowed_turn_is_truncated_where_it_still_calls_tools():
    assert started(max_turns=1).generated(generation(4), [BROKEN]) is State.TRUNCATED
    assert started(max_turns=1).generated(generation(4), []) is State.COMPLETED


def test_results_that_leave_no_room_are_left_out():
    episode = started(max_tokens=12)
    episode.generated(generation(4), [CALL])
    episode.answered(tokens(3))
    assert (episode.state, len(episode.tokens)) == (State.TRUNCATED, 9)


def test_the_room_of_a_turn_is_what_both_limits_allow():
    episode = started(max_turn_tokens=10, max_tokens=16)
    assert episode.room == 10
    episode.generated(generation(4), [CALL])
    episode.answered(tokens(3))
    assert episode.room == 4


def test_a_prompt_that_leaves_no_room_fails():
    with pytest.raises(EpisodeFailed, match="the prompt has 5 tokens") as caught:
        started(max_tokens=5)
    assert caught.value.state is State.FAILED


def test_an_aborted_generation_aborts_the_episode():
    with pytest.raises(EpisodeFailed) as caught:
        started().generated(generation(3, "abort"), [])
    assert caught.value.state is State.ABORTED


@pytest.mark.parametrize("bad", [generation(0), generation(11), generation(3, "tired")])
def test_an_engine_that_breaks_its_promises_fails_the_episode(bad: Generation):
    with pytest.raises(EpisodeFailed, match="the engine gave"):
        started().generated(bad, [])


def test_an_episode_that_is_not_over_has_no_trajectory():
    with pytest.raises(InvariantError, match="generating"):
        started().trajectory(make_ticket(), (), {}, {})


class Machine(RuleBasedStateMachine):
    """Random events against a plain list as the model."""

    @initialize(turns=st.integers(1, 4), room=st.integers(1, 6), total=st.integers(4, 30), prompt=st.integers(1, 3))
    def begin(self, turns: int, room: int, total: int, prompt: int) -> None:
        self.limits = Limits(turns, room, total)
        self.episode = Episode(self.limits)
        self.episode.start(tokens(prompt))
        self.model = [(token, False) for token in range(prompt)]
        self.turns = 0

    @precondition(lambda self: self.episode.state is State.GENERATING)
    @rule(data=st.data(), calls=st.lists(st.sampled_from([CALL, BROKEN]), max_size=2), cut=st.booleans())
    def generate(self, data: st.DataObject, calls: list[ToolCall | MalformedCall], cut: bool) -> None:
        count = data.draw(st.integers(1, self.episode.room))
        state = self.episode.generated(generation(count, "length" if cut else "stop"), calls)
        self.model += [(100 + index, True) for index in range(count)]
        self.turns += 1
        more = bool(calls) and self.turns < self.limits.max_turns
        ends = State.TRUNCATED if calls else State.COMPLETED
        assert state is (State.TRUNCATED if cut else State.TOOL_CALLING if more else ends)

    @precondition(lambda self: self.episode.state is State.TOOL_CALLING)
    @rule(count=st.integers(1, 12))
    def answer(self, count: int) -> None:
        self.episode.answered(tokens(count))
        fits = len(self.model) + count < self.limits.max_tokens
        self.model += [(token, False) for token in range(count)] if fits else []
        assert self.episode.state is (State.GENERATING if fits else State.TRUNCATED)

    @precondition(lambda self: self.episode.state not in (State.FAILED, State.ABORTED))
    @rule()
    def fail(self) -> None:
        with pytest.raises(EpisodeFailed):
            self.episode.fail("a tool broke")

    @precondition(lambda self: self.episode.state in (State.FAILED, State.ABORTED))
    @rule()
    def stay_ended(self) -> None:
        with pytest.raises(InvariantError):
            self.episode.fail("again")

    @precondition(lambda self: self.episode.state is State.GENERATING)
    @rule()
    def abort(self) -> None:
        with pytest.raises(EpisodeFailed):
            self.episode.generated(generation(1, "abort"), [])
        assert self.episode.state is State.ABORTED

    @invariant()
    def what_was_said_stands(self) -> None:
        assert self.episode.tokens.tolist() == [token for token, _ in self.model]
        assert len(self.model) <= self.limits.max_tokens
        assert self.turns <= self.limits.max_turns

    @invariant()
    def a_state_allows_only_its_own_events(self) -> None:
        state = self.episode.state
        for allowed, event in (
            (State.PENDING, lambda: self.episode.start(tokens(1))),
            (State.GENERATING, lambda: self.episode.generated(generation(1), [])),
            (State.TOOL_CALLING, lambda: self.episode.answered(tokens(1))),
        ):
            if state is not allowed:
                with pytest.raises(InvariantError):
                    event()

    @invariant()
    def a_finished_episode_trains_on_what_was_sampled(self) -> None:
        if self.episode.state in (State.COMPLETED, State.TRUNCATED):
            trajectory = self.episode.trajectory(make_ticket(), (), {}, {})
            assert trajectory.loss_mask.tolist() == [sampled for _, sampled in self.model]
            assert trajectory.turns[-1].role is Role.ASSISTANT


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=20)
