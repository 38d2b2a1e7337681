"""The rule `environment`."""

from __future__ import annotations

from msgspec.structs import replace

from asyncrl.scoring.rules.environment import environment
from tests.helpers import make_task, make_trajectory


def test_the_outcome_is_what_the_environment_gave_the_episode_and_its_turns():
    trajectory = make_trajectory()
    assert environment(make_task(), "", trajectory) == 0.0
    turns = [turn._replace(score=score) for turn, score in zip(trajectory.turns, (None, 0.5), strict=False)]
    scored = replace(trajectory, rewards={"won": 1.0, "late": -0.25}, turns=turns)
    assert environment(make_task(), "", scored) == 1.25
