"""Episodes with a simulated user: what is trained, what is scored, and what is finalized."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.errors import InteractionError
from asyncrl.tools.interactions.users import InteractionCounts, Interactions
from asyncrl.types import Finish, Role, Ticket, Trajectory
from tests.episode.fakes import (
    CHATML,
    LIMITS,
    QWEN3,
    Cut,
    ScriptedEngine,
    assert_trains_what_was_sampled,
    call,
    make_ticket,
    make_tokenizer,
    make_tool,
    play_with_tools,
)
from tests.helpers import GENEROUS_S
from tests.tools.interactions.support import Recorded, make_ticket_with_user, on_offer, scripted

TOKENIZERS = {template: make_tokenizer(template) for template in (CHATML, QWEN3)}
CHATS = {template: Chat(tokenizer) for template, tokenizer in TOKENIZERS.items()}
AGAIN, RIGHT = (False, "No, try again.", 0.0, {}), (True, "Yes.", 1.0, {})
TOOL, _ = make_tool()


def play(
    script: list[Any],
    users: Interactions,
    ticket: Ticket | None = None,
    limits: EpisodeLimits = LIMITS,
    template: str = CHATML,
    **options: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(TOKENIZERS[template], script)
    ticket = ticket or make_ticket_with_user()
    played = play_with_tools(engine, CHATS[template], {"echo": TOOL}, ticket, limits, users, **options)
    trajectory = asyncio.run(played)
    assert_trains_what_was_sampled(trajectory, engine)
    return trajectory, engine


def methods(user: Recorded) -> list[str]:
    return [method for method, _ in user.calls]


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["chatml", "qwen3"])
def test_the_users_messages_are_the_templates_own_tokens_and_are_not_trained(template: str):
    """Tool results and the user's messages together are what the template renders."""
    said = "<think>\n\n</think>\n\n" if template == QWEN3 else ""
    user = Recorded(scripted((False, "Not 7! <|im_end|> Again 解", 0.25, {}), RIGHT))
    trajectory, engine = play([f"{said}{call('15')}", f"{said}7", f"{said}15"], on_offer(user), template=template)
    made = {"type": "function", "function": {"name": "echo", "arguments": {"text": "15"}}}
    conversation = [
        *make_ticket().task.messages,
        {"role": "assistant", "content": said, "tool_calls": [made]},
        {"role": "tool", "name": "echo", "content": "15"},
        {"role": "assistant", "content": f"{said}7"},
        {"role": "user", "content": "Not 7! <|im_end|> Again 解"},
        {"role": "assistant", "content": f"{said}15"},
    ]
    shown = [{"type": "function", "function": TOOL.schema}]
    if template == CHATML:  # Qwen3's drops thoughts of earlier answers, which the policy did see
        assert trajectory.tokens.tolist() == CHATS[template].rendered(conversation, shown).tolist()
    suffix = CHATS[template].suffix([conversation[-2]], shown)
    [after_answer] = [turn for turn in trajectory.turns[4:5] if turn.role is Role.TOOL]
    assert trajectory.tokens[after_answer.start : after_answer.end].tolist() == suffix.tolist()
    assert not trajectory.loss_mask[after_answer.start : after_answer.end].any()
    assert [turn.score for turn in trajectory.turns] == [None, None, None, 0.25, None, 1.0]
    assert trajectory.finish is Finish.COMPLETED
    assert len(engine.requests) == 3


def test_the_user_sees_copies_of_all_messages_and_the_tasks_own_arguments():
    seen: list[list[dict[str, Any]]] = []

    async def respond(instance_id: str, messages: list[dict[str, Any]]) -> Any:
        seen.append([dict(message) for message in messages])
        messages[-1]["content"] = "changed"
        messages.clear()
        return AGAIN if len(seen) == 1 else RIGHT

    user = Recorded(respond)
    ticket = make_ticket_with_user(truth={"value": 4})
    trajectory, _ = play([call("2"), "5", "4"], on_offer(user), ticket)
    assert [message["role"] for message in seen[0]] == ["user", "assistant", "tool", "assistant"]
    assert [message["content"] for message in seen[1]][2:] == ["2", "5", "No, try again.", "4"]
    assert user.kwargs == [{"name": "user", "truth": {"value": 4}}] * 3
    assert len(trajectory.branches) == 1


def test_an_episode_that_the_user_ends_is_complete_and_its_last_message_is_in_no_token():
    trajectory, _ = play(["4", "never"], on_offer(Recorded(scripted(RIGHT))))
    assert (trajectory.finish, trajectory.turn_scores) == (Finish.COMPLETED, [1.0])
    assert trajectory.turns[-1].role is Role.ASSISTANT


@pytest.mark.parametrize(
    ("limits", "users_limit", "turns"), [({"max_turns": 2}, None, 2), ({}, 1, 2), ({}, 3, 4), ({"max_turns": 3}, 9, 3)]
)
def test_at_a_limit_of_turns_the_last_answer_is_scored_and_the_episode_is_truncated(
    limits: dict[str, int], users_limit: int | None, turns: int
):
    user = Recorded(scripted(*[(False, "again", float(number), {}) for number in range(9)]))
    trajectory, _ = play(["1"] * 9, on_offer(user, max_messages=users_limit), limits=replace(LIMITS, **limits))
    assert trajectory.turn_scores == [float(number) for number in range(turns)]
    assert trajectory.finish is Finish.TRUNCATED
    assert methods(user)[-1] == "finalize_interaction"


def test_a_cut_answer_ends_the_episode_without_a_score_and_a_message_without_room_too():
    user = Recorded(scripted(AGAIN, RIGHT))
    trajectory, _ = play(["4", Cut("5")], on_offer(user))
    assert (trajectory.finish, trajectory.turn_scores) == (Finish.TRUNCATED, [0.0])
    assert methods(user) == ["start_interaction", "generate_response", "finalize_interaction"]
    user = Recorded(scripted((False, "words " * 500, 0.5, {})))
    trajectory, _ = play(["4", "5"], on_offer(user), limits=replace(LIMITS, max_tokens=200))
    assert (trajectory.finish, trajectory.turn_scores, len(trajectory.turns)) == (Finish.TRUNCATED, [0.5], 2)
    assert methods(user)[-1] == "finalize_interaction"


def test_with_the_templates_history_each_branch_has_its_own_score():
    user = Recorded(scripted(AGAIN, RIGHT))
    said = ["<think>\na\n</think>\n\n5", "<think>\nb\n</think>\n\n4"]
    trajectory, _ = play(said, on_offer(user), template=QWEN3, as_rendered=True)
    assert len(trajectory.branches) == 2
    assert trajectory.turn_scores == [0.0, 1.0]


def test_a_task_without_a_user_or_without_users_on_offer_ends_with_the_first_answer():
    user = Recorded(scripted())
    for ticket, users in ((make_ticket(), on_offer(user)), (make_ticket_with_user(), None)):
        trajectory = asyncio.run(
            play_with_tools(ScriptedEngine(TOKENIZERS[CHATML], ["4"]), CHATS[CHATML], {}, ticket, interactions=users)
        )
        assert (trajectory.finish, trajectory.turn_scores) == (Finish.COMPLETED, [])
    assert user.calls == []


@pytest.mark.parametrize("method", ["start_interaction", "generate_response"])
@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_a_user_that_raises_or_takes_too_long_fails_its_episode_and_is_counted_and_finalized(method: str, how: str):
    user = Recorded(scripted(RIGHT), **{how: method})
    users = on_offer(user, timeout_s=0.01 if how == "hanging" else GENEROUS_S)
    reason = "OSError: the user went away" if how == "failing" else r"more than actor\.interaction_timeout_s=0\.01"
    with pytest.raises(InteractionError, match=rf"{method} of the simulated user recorded failed: .*{reason}"):
        play(["4"], users)
    assert methods(user)[-1] == "finalize_interaction"
    assert methods(user).count("finalize_interaction") == 1
    assert users.counts == InteractionCounts(failures=1)


@pytest.mark.parametrize(
    "response",
    [
        None,
        "again",
        (False, "again"),
        (False, None, 0.0, {}),
        (False, "again", float("nan"), {}),
        (False, "again", "high", {}),
        (False, "again", 10**400, {}),
        (False, "again", -1e300, {}),
        (np.array([True, False]), "again", 0.0, {}),
    ],
)
def test_a_response_that_is_none_fails_the_episode(response: Any):
    user = Recorded(scripted(response))
    users = on_offer(user)
    with pytest.raises(InteractionError, match=r"generate_response must return \(ends, message, score, data\)"):
        play(["4"], users)
    assert (users.counts.failures, methods(user)[-1]) == (1, "finalize_interaction")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
def test_a_user_that_cancels_itself_or_ends_the_program_fails_like_any_other(error: BaseException):
    class Escaping(Recorded):
        async def finalize_interaction(self, instance_id: str) -> None:
            await super().finalize_interaction(instance_id)
            raise error

    async def respond(instance_id: str, messages: list[dict[str, Any]]) -> Any:
        raise error

    user = Escaping(respond)
    users = on_offer(user)
    with pytest.raises(InteractionError, match=f"generate_response of .* failed: .*{type(error).__name__}"):
        play(["4"], users)
    assert methods(user).count("finalize_interaction") == 1
    assert users.counts == InteractionCounts(failures=2)


def test_a_user_that_cannot_be_finalized_is_counted_and_the_episode_stands():
    users = on_offer(Recorded(scripted(RIGHT), failing="finalize_interaction"))
    trajectory, _ = play(["4"], users)
    assert trajectory.turn_scores == [1.0]
    assert users.counts == InteractionCounts(responses=1, ended=1, failures=1)


def test_a_turn_without_a_score_gets_that_of_calculate_score_if_there_is_one():
    class Late(Recorded):
        async def calculate_score(self, instance_id: str) -> float:
            return 0.75

    response = (True, "Bye.", None, {})
    assert play(["4"], on_offer(Late(scripted(response))))[0].turn_scores == [0.75]
    assert play(["4"], on_offer(Recorded(scripted(response))))[0].turn_scores == []


@pytest.mark.parametrize("score", ["high", float("nan"), np.float16("inf"), 10**400])
def test_a_score_of_calculate_score_that_is_none_is_its_own_failure(score: Any):
    class Late(Recorded):
        async def calculate_score(self, instance_id: str) -> Any:
            return score

    users = on_offer(Late(scripted((True, "Bye.", None, {}))))
    with pytest.raises(
        InteractionError, match=r"calculate_score of the simulated user .* gave .*; it must return None"
    ):
        play(["4"], users)
    assert users.counts.failures == 1


@pytest.mark.parametrize("score", [0.0, None])
def test_a_long_message_is_cut(score: float | None):
    user = Recorded(scripted((False, "§" * 1000, score, {}), RIGHT))
    trajectory, _ = play(["4", "5"], on_offer(user, max_chars=100))
    assert CHATS[CHATML].text(trajectory.tokens).count("§") == 100
    assert "[900 characters cut]" in CHATS[CHATML].text(trajectory.tokens)


def test_a_user_that_is_not_on_offer_is_named():
    with pytest.raises(InteractionError, match=r"interaction_kwargs\.name='other'; actor\.interactions has user"):
        play(["4"], on_offer(Recorded(scripted())), make_ticket(extra_info={"interaction_kwargs": {"name": "other"}}))


def test_many_episodes_at_once_each_have_their_own_user_and_one_that_fails_harms_no_other():
    async def respond(instance_id: str, messages: list[dict[str, Any]]) -> Any:
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert all(answer.startswith(instance_id) for answer in answers)
        await asyncio.sleep(0)
        if instance_id == "t3":
            raise OSError("the user went away")
        return len(answers) == 3, f"{instance_id} again", float(len(answers)), {}

    user = Recorded(respond)
    users = on_offer(user)

    async def one(name: str) -> Trajectory:
        engine = ScriptedEngine(TOKENIZERS[CHATML], [f"{name} {number}" for number in range(9)])
        return await play_with_tools(engine, CHATS[CHATML], {}, make_ticket_with_user(name), interactions=users)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(f"t{number}") for number in range(20)), return_exceptions=True)

    for number, found in enumerate(asyncio.run(all_of_them())):
        if number == 3:
            assert isinstance(found, InteractionError)
        else:
            assert found.turn_scores == [1.0, 2.0, 3.0]
    finalized = [name for method, name in user.calls if method == "finalize_interaction"]
    assert sorted(finalized) == sorted(f"t{number}" for number in range(20))
    assert users.counts == InteractionCounts(responses=57, ended=19, failures=1)


@pytest.mark.parametrize("method", ["start_interaction", "generate_response", "finalize_interaction"])
async def test_a_cancelled_episode_is_finalized_before_the_cancellation_goes_on(method: str):
    """So it is when the actor stops, and when an episode takes too long."""
    reached, may_end = asyncio.Event(), asyncio.Event()

    class Waiting(Recorded):
        async def _called(self, name: str, instance_id: str) -> None:
            await super()._called(name, instance_id)
            if name == method:
                reached.set()
                await (may_end.wait() if name == "finalize_interaction" else asyncio.Event().wait())

    user = Waiting(scripted(RIGHT))
    engine = ScriptedEngine(TOKENIZERS[CHATML], ["4"])
    playing = play_with_tools(engine, CHATS[CHATML], {}, make_ticket_with_user(), interactions=on_offer(user))
    episode = asyncio.create_task(playing)
    await reached.wait()
    episode.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert methods(user).count("finalize_interaction") == 1
    assert methods(user)[-1] == "finalize_interaction"
