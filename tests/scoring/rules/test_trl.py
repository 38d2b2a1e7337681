"""Reward functions of TRL are used as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring import answers
from asyncrl.scoring.rules.base import RuleInput, RuleScores, RunStep
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.types import TEXT_PROMPT
from tests.scoring.fakes import CharTokenizer, answered

HERE = f"{__name__}."
seen: list[dict[str, Any]] = []


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def correct(prompts, completions, answer, **kwargs):
    return [1.0 if text[-1]["content"] == truth else 0.0 for text, truth in zip(completions, answer, strict=True)]


async def coding_only(completions, topic, **kwargs):
    return [0.25 if each == "code" else None for each in topic]


def never(completions, **kwargs):
    return [None] * len(completions)


def looked_at(prompts, completions, completion_ids, ground_truth, trainer_state, level=None, **kwargs):
    state = (trainer_state.global_step, trainer_state.max_steps)
    given = {"prompts": prompts, "completions": completions, "ids": completion_ids, "truth": ground_truth}
    seen.append({**given, "level": level, "state": state, "columns": sorted(kwargs)})
    return [1.0]


def with_few_names(completions, level):
    return level


def logging(completions, log_extra, log_metric, **kwargs):
    log_extra("found", [completions[0][-1]["content"]])
    log_metric("share", 0.5)
    return [1.0]


def short(completion_ids, limit=3, **kwargs):
    return [float(len(ids) <= limit) for ids in completion_ids]


def raises(completions, **kwargs):
    return [completions[0][0]["text"]]


def logs_a_score(completions, log_metric, **kwargs):
    log_metric("score", 1.0)
    return [1.0]


def one_number(completions, **kwargs):
    return 1.0


def a_set(completions, **kwargs):
    return {1.0}


def no_list(completions, **kwargs):
    return np.array(1.0)


def as_array(completions, **kwargs):
    return np.array([0.5] * len(completions))


class Labelled:
    """The rewards of a pandas series, whose labels need not begin with 0."""

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([0.5])

    def __getitem__(self, label):
        raise KeyError(label)


def as_series(completions, **kwargs):
    return Labelled()


def huge(completions, **kwargs):
    return [10**400]


def longer_than_python_writes(completions, **kwargs):
    return [10**5000]


def too_many(completions, **kwargs):
    return [1.0, 2.0]


def not_finite(completions, **kwargs):
    return [float("nan")]


def of_environments(completions, environments):
    return [1.0]


def anything(*args, **kwargs):
    return [float("completions" in kwargs)]


class Callable:
    def __call__(self, completions, **kwargs):
        return [2.0]


instance = Callable()


def given(text: str, extra: dict[str, Any] | None = None, **changes: Any) -> RuleInput:
    """An episode of a call, its result and `text`, with the fields `extra` of the row."""
    task, trajectory = answered(text, **changes)
    return answers.rule_input(replace(task, extra_info=extra or {}), trajectory, CharTokenizer())


def judge(rules: Any, text: str = "72", extra: dict[str, Any] | None = None) -> RuleScores:
    return load_rules(ScoringConfig(rule=rules)).score(given(text, extra))


def test_completions_are_messages_with_calls_and_results_and_columns_are_lists() -> None:
    seen.clear()
    episode = replace(given("72", {"level": 3, "answer": "72"}), progress=RunStep(4, 10))
    load_rules(ScoringConfig(rule=HERE + "looked_at")).score(episode)
    (call,) = seen
    calls = [{"type": "function", "function": {"name": "calculator", "arguments": {}}}]
    assert call == {
        "prompts": [[{"role": "user", "content": "?"}]],
        "completions": [
            [
                {"role": "assistant", "content": "call", "tool_calls": calls},
                {"role": "tool", "content": "ok"},
                {"role": "assistant", "content": "72"},
            ]
        ],
        "ids": [episode.trajectory.tokens[5:].tolist()],
        "truth": ["72"],
        "level": [3],
        "state": (4, 10),
        "columns": ["answer", "data_source", "extra_info", "log_extra", "log_metric", "reward_model"],
    }


def test_a_prompt_that_the_file_has_as_text_is_a_text_and_so_is_the_completion() -> None:
    seen.clear()
    judge(HERE + "looked_at", extra={TEXT_PROMPT: True})
    assert (seen[0]["prompts"], seen[0]["completions"]) == (["?"], ["callok72"])
    assert judge(HERE + "length", extra={TEXT_PROMPT: True}).outcome == 8.0
    assert judge(HERE + "length").outcome == 3.0


def test_the_sum_has_the_weights_and_leaves_out_a_function_that_returned_none() -> None:
    rules = [
        {"name": HERE + "coding_only", "weight": 4.0},
        {"name": HERE + "correct", "weight": 0.5},
        {"name": HERE + "length", "weight": -0.1},
    ]
    # 4 * 0.25 + 0.5 * 1 - 0.1 * 3 messages, and the same without the first term.
    code = judge(rules, extra={"topic": "code", "answer": "72"})
    assert code.total == pytest.approx(1.2)
    assert (code.outcome, code.scores) == (0.25, {"coding_only": 0.25, "correct": 1.0, "length": 3.0})
    sums = judge(rules, extra={"topic": "sums", "answer": "72"})
    assert sums.total == pytest.approx(0.2)
    assert (sums.outcome, sums.scores) == (1.0, {"correct": 1.0, "length": 3.0})


def test_a_rule_of_asyncrl_and_a_function_of_trl_may_be_mixed() -> None:
    assert judge(["exact_match", {"name": HERE + "never", "weight": 9.0}]).scores == {"exact_match": 1.0}


def test_an_episode_to_which_no_function_applies_is_a_failure() -> None:
    with pytest.raises(ScoringError, match="no rule applies to task task-0: never returned None"):
        judge(HERE + "never")


def test_logged_numbers_and_texts_are_kept_with_the_episode() -> None:
    found = judge(HERE + "logging")
    assert found.scores == {"logging": 1.0, "logging/share": 0.5}
    assert [each.text for each in found.reasons] == ["found: 72"]


def test_functions_with_few_names_ids_options_and_a_call_method_work() -> None:
    assert judge(HERE + "with_few_names", extra={"level": 2.0}).outcome == 2.0
    assert judge(HERE + "short").outcome == 0.0
    assert judge([{"name": HERE + "short", "params": {"limit": 99}}]).outcome == 1.0
    assert judge(HERE + "instance").outcome == 2.0


def test_a_function_whose_parameters_do_not_tell_needs_its_kind() -> None:
    with pytest.raises(ConfigError, match=r"several kinds of function.*kind: trl"):
        judge(HERE + "anything")
    assert judge([{"name": HERE + "anything", "kind": "trl"}]).outcome == 1.0


@pytest.mark.parametrize("name", ["as_array", "as_series"])
def test_arrays_and_series_are_lists_of_rewards(name: str) -> None:
    assert judge(HERE + name).outcome == 0.5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "raises",
            r"raises raised KeyError: 'text' \(.*test_trl\.py, line \d+\), at task task-0; its completion is a list",
        ),
        ("logs_a_score", "logs_a_score raised ValueError: log_metric cannot use the name score, which a rule's result"),
        ("one_number", "one_number, at task task-0, returned 1.0; it must return a list"),
        ("too_many", "too_many, at task task-0, returned 2 rewards for 1 completion"),
        ("correct", "correct takes answer, which task task-0 lacks. The task has .*ground_truth.*default value"),
        ("a_set", r"a_set, at task task-0, returned \{1.0\}; it must return a list.*test_trl\.py, line \d+\)$"),
        ("no_list", r"returned array\(1.\), which cannot be read as a list \(TypeError.*test_trl\.py, line \d+\)$"),
        ("huge", r"huge, .* returned the reward 1000.*; a reward is a number of at most 3.4e\+38, or None"),
        ("longer_than_python_writes", r"the reward a value of type int that cannot be shown.*, line \d+\)$"),
        ("not_finite", "not_finite, at task task-0, returned the reward nan; a reward is a number"),
    ],
)
def test_a_failure_names_the_function_and_the_task(name: str, reason: str) -> None:
    with pytest.raises(ScoringError, match=reason):
        judge(HERE + name)


def test_a_function_that_needs_environments_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"takes `environments`.*let the environment give the reward"):
        judge(HERE + "of_environments")


def test_a_missing_column_is_found_before_any_episode() -> None:
    rules = load_rules(ScoringConfig(rule=["exact_match", HERE + "correct"]))
    with pytest.raises(ScoringError, match="correct takes answer, which task task-0 lacks"):
        rules.check(given("72").task)
    rules.check(given("72", {"answer": "72"}).task)
