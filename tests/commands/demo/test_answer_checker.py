"""The user who knows the right number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.commands.demo.answer_checker import AnswerChecker
from asyncrl.errors import ConfigError, ScoringError


def talk(checker: AnswerChecker, *answers: str, truth: Any = "1,234") -> list[Any]:
    """The responses to the answers, without their further data."""

    async def conversation() -> list[Any]:
        await checker.start_interaction("e", ground_truth=truth, name="checker")
        given = [await checker.generate_response("e", [{"role": "assistant", "content": each}]) for each in answers]
        await checker.finalize_interaction("e")
        return [response[:3] for response in given]

    return asyncio.run(conversation())


def test_a_right_number_ends_the_conversation_and_a_wrong_one_may_be_mended() -> None:
    responses = talk(AnswerChecker({"right": "Yes.", "wrong": "No."}), "1233", "no idea", "so it is 1234")
    assert responses == [(False, "No.", 0.0), (False, "No.", 0.0), (True, "Yes.", 1.0)]


def test_after_all_tries_a_wrong_answer_ends_the_conversation_and_each_conversation_has_its_own() -> None:
    checker = AnswerChecker({"tries": 2})
    for _ in range(2):
        assert [ends for ends, _, _ in talk(checker, "1", "2")] == [False, True]


def test_strict_wants_the_mark_and_thoughts_are_no_answer() -> None:
    assert [score for _, _, score in talk(AnswerChecker({"strict": True}), "1234", "#### 1234")] == [0.0, 1.0]
    assert talk(AnswerChecker({}), "<think>1234</think> 5")[0][2] == 0.0


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"trys": 2}, "config has trys"), ({"tries": 0}, "config.tries is 0"), ({"tries": "two"}, "it must be 1 or more")],
)
def test_a_config_with_something_else_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        AnswerChecker(config)


@pytest.mark.parametrize("truth", ["many", None])
def test_a_ground_truth_without_a_number_fails(truth: Any) -> None:
    with pytest.raises(ScoringError, match="ground truth"):
        talk(AnswerChecker({}), "1", truth=truth)
