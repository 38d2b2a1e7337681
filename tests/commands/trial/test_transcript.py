"""The rewards of an episode that the terminal shows."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console

from asyncrl.commands.trial.transcript import Transcript
from asyncrl.types import Trajectory
from tests.helpers import make_trajectory


def outcome(trajectory: Trajectory) -> str:
    out = io.StringIO()
    Transcript(Console(file=out, width=100)).outcome(trajectory)
    return out.getvalue()


def test_rewards_of_turns_stand_beside_those_of_the_episode_or_in_their_place() -> None:
    silent = make_trajectory()
    assert "no reward" in outcome(silent)
    *before, last = silent.turns
    scored = replace(silent, turns=[*before, last._replace(score=0.25)])
    assert "turns         0.25" in outcome(scored)
    assert "environment" not in outcome(scored)
    both = outcome(replace(scored, rewards={"won": 1.0}))
    assert "turns         0.25" in both
    assert "environment   won 1" in both
