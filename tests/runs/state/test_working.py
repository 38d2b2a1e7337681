"""A run says what it works at, also in its quiet phases."""

from __future__ import annotations

import pytest

from asyncrl.machine.doing import Doing
from asyncrl.runs.state.situation import RoleNow
from asyncrl.runs.state.working import working


def roles(**phases: str) -> dict[str, RoleNow]:
    return {name: RoleNow(name, does=Doing(phase, 0.0), does_s=2.0) for name, phase in phases.items()}


def test_roles_that_start_are_named_until_all_have_started() -> None:
    assert working({"learner": RoleNow("learner")}) == "learner starts"
    assert working(roles(replay="serve", actor="start", learner="start")) == "actor, learner start"
    many = roles(**{f"actor_{index}": "start" for index in range(5)})
    assert working(many) == "actor_0, actor_1, actor_2 and 2 more start"
    assert working({}) == "", "there is no supervisor"


def test_long_work_is_shown_with_the_time_that_is_left() -> None:
    loads = RoleNow("actor-0", does=Doing("start", 0.0, "loading the model: 12 of 30 GB, 20 s left"))
    assert working({**roles(learner="start"), "actor-0": loads}) == (
        "actor-0 is loading the model: 12 of 30 GB, 20 s left"
    )
    assert working({"actor-0": loads, "actor-1": loads}).endswith("20 s left (and 1 more)")


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("wait", "learner waits for the batch"),
        ("train", "learner trains"),
        ("proximal", "learner trains"),
        ("publish", "learner publishes weights"),
        ("checkpoint", "learner writes a checkpoint"),
        ("evaluate", "learner evaluates the held-out data"),
        ("export", "learner writes the trained model"),
    ],
)
def test_each_phase_of_the_learner_has_its_words(phase: str, words: str) -> None:
    assert working(roles(replay="serve", learner=phase)) == words


def test_a_phase_that_lasts_is_shown_with_its_duration() -> None:
    lasts = RoleNow("learner", does=Doing("checkpoint", 0.0), does_s=80.0)
    assert working({"learner": lasts}) == "learner writes a checkpoint for 80 s"
