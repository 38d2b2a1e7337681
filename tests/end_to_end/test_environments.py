"""A whole run in processes whose episodes are played in an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from asyncrl.commands.demo.arithmetic import parse
from asyncrl.commands.demo.tool import StepCalculator
from asyncrl.replay.stored import StoredRun
from asyncrl.types import Task, Trajectory
from tests.end_to_end.support import Run

Start = Callable[..., Run]


class Arithmetic:
    """The demo's calculator, which counts the operations that are left."""

    def reset(self, prompt: list[Mapping[str, Any]], **row: Any) -> None:
        self.left: int | None = None

    async def calculator(self, operator: Literal["+", "-", "*"], expression: str) -> str:
        """Works out the leftmost operation with the given operator, and returns the expression left.

        Args:
            operator: one of + - *
            expression: whole numbers with + - * between them
        """
        answer = await StepCalculator("").execute({"expression": expression, "operator": operator})
        found = parse(answer)
        self.left = 0 if found is None else len(found.operators)
        return answer

    def get_reward(self) -> float:
        return 1.0 if self.left == 0 else 0.0


def score(task: Task, answer: str, trajectory: Trajectory) -> float:
    return trajectory.rewards["Arithmetic"]


@pytest.mark.long
def test_the_demos_policy_trains_in_an_environment_and_each_episode_is_one_branch(
    start: Start, prepared: list[str]
) -> None:
    environment = [f"actor.environment={__name__}.Arithmetic", "actor.tools=[]", f"scoring.rule={__name__}.score"]
    changes = ("replay.retention=all", "learner.steps=2", "learner.eval_every=0")
    run = start("train", *prepared, *environment, *changes)
    run.finish()
    assert len(run.steps()) == 2
    stored = StoredRun(run.dir / "replay")
    plans = [stored.plan(step) for step in range(2)]
    trained = [stored.trajectory(name) for plan in plans if plan for name in plan.ids]
    stored.close()
    assert len(trained) == 2 * 64
    for each in trained:
        assert each is not None
        assert len(each.branches) == 1
        assert set(each.rewards) == {"Arithmetic"}
    assert {each.rewards["Arithmetic"] for each in trained if each} == {0.0, 1.0}
