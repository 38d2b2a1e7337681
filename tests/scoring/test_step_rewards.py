"""The function of `scoring.steps`: what it gets and may return, its faults, and its numbers as step scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.config.schema import ScoringConfig, ShapingConfig
from asyncrl.config.schema.scoring import needs
from asyncrl.errors import AsyncrlError, ConfigError, ScoringError
from asyncrl.scoring.answers import texts_of_steps
from asyncrl.scoring.labels import ScoredEpisode
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.step_rewards import StepFunction, StepInput, StepRewards
from asyncrl.types import Labels, Task, Trajectory
from tests.helpers import GENEROUS_S
from tests.scoring.fakes import CharTokenizer, InProcess, answered, lease, lines

NAME = f"{__name__}.right_words"


def right_words(task: Task, texts: Sequence[str], trajectory: Trajectory) -> list[float]:
    """1 for a step with the ground truth, and a tenth for any other."""
    assert len(texts) == len(trajectory.steps)
    return [1.0 if task.truth_text in text else 0.1 for text in texts]


async def every_parameter(
    task: Task, trajectory: Trajectory, texts: list[str], answer: str, full_answer: str, deadline: float, confined: Any
) -> np.ndarray[Any, Any]:
    assert (answer, full_answer, deadline) == ("72", "<think>a\nb</think>72", 5.0)
    assert callable(confined)
    task.extra_info["changed"] = texts.clear()  # type: ignore[index]
    return np.arange(len(trajectory.steps), dtype=np.float32)


def whatever(**given: Any) -> list[float]:
    return [float(len(given))] * len(given["texts"])


def of_number(answer: str) -> Any:
    """Values that a function may return for an episode with three steps."""
    return {
        "few": [1.0, 2.0],
        "many": [1.0] * 4,
        "none": None,
        "text": "abc",
        "mapping": {"a": 1.0, "b": 2.0, "c": 3.0},
        "nan": [1.0, float("nan"), 1.0],
        "large": [1.0, 1.0, 1e39],
        "huge": [1.0, 10**5000, 1.0],
        "set": {1.0, 2.0, 3.0},
        "gap": [1.0, None, 1.0],
        "pairs": np.ones((3, 2)),
        "single": np.array(0.5),
    }[answer.split()[-1]]


def faulty() -> list[float]:
    raise LookupError("no such thing")


def faulty_generator() -> Iterator[float]:
    yield 1.0
    raise LookupError("no such thing")


def needs_more(task: Task, weight: float) -> list[float]:
    return [weight]


not_a_function = 3


def given(found: tuple[Task, Trajectory], answer: str = "") -> StepInput:
    task, trajectory = found
    return StepInput(task, trajectory, texts_of_steps(trajectory, CharTokenizer()), answer, answer, 5.0)


def function(name: str) -> StepFunction:
    return StepFunction(f"{__name__}.{name}")


def test_a_function_gets_what_it_names_and_gives_a_number_for_each_step() -> None:
    found = lines("think", "it is 72", "done")
    assert function("right_words")(given(found)) == [0.1, 1.0, 0.1]
    assert function("whatever")(given(found)) == [7.0, 7.0, 7.0]
    full = replace(given(found, "72"), full_answer="<think>a\nb</think>72")
    assert function("every_parameter")(full) == [0.0, 1.0, 2.0]
    assert full.task.extra_info == {}
    assert len(full.texts) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("few", "returned 2 numbers for 3 steps"),
        ("many", "returned 4 numbers for 3 steps"),
        ("none", "returned None; it must return a list with one number for each step"),
        ("text", "returned 'abc'; it must return a list"),
        ("mapping", r"returned \{.*\}; it must return a list"),
        ("nan", "returned nan for step 2 of 3; it must be a finite float32"),
        ("large", r"returned 1e\+39 for step 3 of 3"),
        ("huge", r"returned a value of type int that cannot be shown .* for step 2 of 3"),
        ("set", r"returned \{.*\}; it must return a list"),
        ("gap", "returned None for step 2 of 3"),
        ("single", r"returned array\(0.5\); it must return a list"),
        ("pairs", r"returned array\(\[1., 1.\]\) for step 1 of 3"),
    ],
)
def test_anything_but_one_finite_number_a_step_is_a_failure_with_the_functions_file_and_line(
    answer: str, reason: str
) -> None:
    line = of_number.__code__.co_firstlineno
    place = rf"scoring\.steps={__name__}\.of_number \(.*test_step_rewards\.py, line {line}\) "
    with pytest.raises(ScoringError, match=place + reason):
        function("of_number")(given(lines("a", "b", "c"), answer))


@pytest.mark.parametrize("name", ["faulty", "faulty_generator"])
def test_an_exception_of_the_function_is_a_failure_with_its_reason(name: str) -> None:
    with pytest.raises(ScoringError, match=rf"{name} \(.*, line \d+\) raised LookupError: no such thing"):
        function(name)(given(lines("a")))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("needs_more", "missing a required argument: 'weight'.*its parameters may be task, trajectory, texts, answer"),
        ("not_a_function", "cannot reward steps"),
        ("no_such_function", r"scoring\.steps=.*no_such_function cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_loaded(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        function(name)


class InThisProcess:
    """The function without processes of its own."""

    def __init__(self, config: ScoringConfig) -> None:
        self._function = StepFunction(config.steps or NAME)

    def submit(self, given: StepInput) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(np.array(self._function(given), np.float32))
        except AsyncrlError as error:
            future.set_exception(error)
        return future


def scored(config: ScoringConfig, *found: tuple[Task, Trajectory]) -> list[ScoredEpisode | ScoringError]:
    rewards: Any = InThisProcess(config)
    scorer = Scorer(config, CharTokenizer(), InProcess(config), step_rewards=rewards)  # type: ignore[arg-type]
    return list(scorer.score([lease(each, *needs(config, each[0].data_source)) for each in found]))


def label(config: ScoringConfig, found: tuple[Task, Trajectory]) -> Labels:
    (result,) = scored(config, found)
    assert isinstance(result, ScoredEpisode), result
    return result.labels


def test_the_numbers_are_step_scores_with_the_weight_and_aggregation_of_a_process_model() -> None:
    shaping = ShapingConfig(process_weight=0.5, environment_weight=2.0)
    found = lines("so 72", "hm", "72", rewards={"tool": 0.25})
    labels = label(ScoringConfig(steps=NAME, shaping=shaping), found)
    assert labels.step_scores.tolist() == pytest.approx([1.0, 0.1, 1.0])
    assert labels.step_ends.tolist() == [step.end for step in found[1].steps]
    assert labels.extra["process"] == pytest.approx(0.7)
    assert labels.outcome == 1.0
    assert labels.reward == pytest.approx(1.0 + 0.5 * 0.7 + 2.0 * 0.25)
    assert labels.scorer == f"exact_number+{NAME}"
    for how, number in {"min": 0.1, "product": 0.1, "pooled_last": 1.0}.items():
        config = ScoringConfig(steps=NAME, shaping=replace(shaping, prm_aggregation=how))
        assert label(config, found).extra["process"] == pytest.approx(number)


def test_an_algorithm_may_read_the_numbers_alone_and_after_transforms() -> None:
    shaping = ShapingConfig(prm_aggregation="per_step", step_transforms=["delta"])
    labels = label(ScoringConfig(steps=NAME, shaping=shaping), lines("so 72", "hm", "72"))
    assert "process" not in labels.extra
    assert labels.reward == 1.0
    assert labels.step_scores.tolist() == pytest.approx([0.9, -0.9, 1.0])


def test_the_guards_against_process_models_leave_the_numbers_of_a_function_as_they_are() -> None:
    """A repeated step, a step after the answer and a long episode keep their numbers."""
    (result,) = scored(ScoringConfig(steps=NAME), lines("#### 72", "#### 72", "x" * 2000))
    assert isinstance(result, ScoredEpisode)
    assert result.labels.step_scores.tolist() == pytest.approx([1.0, 1.0, 0.1])
    assert result.agree is None


def test_with_shadow_the_numbers_are_recorded_and_nothing_trains_on_them() -> None:
    shaping = ShapingConfig(process_weight=1.0)
    labels = label(ScoringConfig(steps=NAME, shadow=True, shaping=shaping), lines("72"))
    assert labels.reward == 1.0
    assert labels.extra["shadow/process"] == 1.0
    assert not len(labels.step_scores)


def test_the_numbers_of_a_function_take_the_place_of_the_rewards_of_turns() -> None:
    task, trajectory = answered("72")
    turns = tuple(each._replace(score=5.0 if each.role == "assistant" else None) for each in trajectory.turns)
    found = task, msgspec.structs.replace(trajectory, turns=turns)
    assert label(ScoringConfig(), found).step_scores.tolist() == [5.0, 5.0]
    assert label(ScoringConfig(steps=NAME), found).step_scores.tolist() == pytest.approx([0.1, 1.0])


def test_a_failure_of_the_function_is_a_failure_of_its_episode_alone() -> None:
    config = ScoringConfig(steps=f"{__name__}.only_right", rule="exact_match")
    good, bad = scored(config, answered("72"), answered("71", index=1))
    assert isinstance(good, ScoredEpisode)
    assert isinstance(bad, ScoringError)
    assert "only_right" in str(bad)
    assert "returned 0 numbers for 2 steps" in str(bad)


def only_right(answer: str, texts: list[str]) -> list[float]:
    return [1.0] * len(texts) if answer == "72" else []


def test_a_source_may_do_without_the_function_and_a_manager_does_not_replace_it() -> None:
    config = ScoringConfig(steps=NAME, needs={"plain": ["rules"]})
    assert needs(config, "other") == ("rules", "steps")
    assert not len(label(config, answered("72", source="plain")).step_scores)
    config.manager.name = "naive"
    assert needs(config, "other") == ("steps", "manager")


MODULE = """
import asyncio
import os


async def steps(task, trajectory, texts, answer):
    await asyncio.sleep(0)
    if answer == "loop":
        while True:
            pass
    if answer == "crash":
        os._exit(3)
    if answer == "raise":
        raise LookupError("no such thing")
    print("a function may print")
    return [float(task.ground_truth == text) for text in texts]
"""


@pytest.mark.slow
def test_the_function_runs_in_a_process_of_its_own_and_each_fault_costs_one_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "isolated_steps.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = ScoringConfig(steps="isolated_steps.steps", timeout_s=GENEROUS_S)

    def rewards(scorer: StepRewards, text: str) -> list[float]:
        return scorer.submit(given(answered(text), text)).result().tolist()  # type: ignore[no-any-return]

    with closing(StepRewards(config)) as scorer:
        assert rewards(scorer, "72") == [0.0, 1.0]
        for text, reason in {
            "crash": "scoring.steps=isolated_steps.steps ended its process with status 3",
            "raise": r"isolated_steps.py, line \d+\) raised LookupError: no such thing",
        }.items():
            with pytest.raises(ScoringError, match=reason):
                rewards(scorer, text)
        assert rewards(scorer, "72") == [0.0, 1.0]
    with (
        closing(StepRewards(replace(config, timeout_s=1.0))) as scorer,
        pytest.raises(ScoringError, match=r"isolated_steps.steps took longer than scoring\.timeout_s=1"),
    ):
        rewards(scorer, "loop")


@pytest.mark.slow
def test_a_function_that_cannot_be_loaded_is_refused_by_its_process() -> None:
    with pytest.raises(ConfigError, match=r"scoring\.steps=.*needs_more cannot reward steps"):
        StepRewards(ScoringConfig(steps=f"{__name__}.needs_more"))
