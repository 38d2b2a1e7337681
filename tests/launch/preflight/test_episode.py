"""Before anything starts: an episode under a script finds tools, environments and rules that always fail."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asyncrl.actor.from_config import open_runner
from asyncrl.chat.from_config import open_chat
from asyncrl.config.schema import ScoringConfig, TrainConfig
from asyncrl.data.reading import TaskFile
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.launch.preflight.episode import TRIAL_S, EpisodeJudge, TrialStage, check_episodes
from asyncrl.launch.preflight.made_up import made_up_arguments
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.scoring.rules.base import RuleInput, RuleScores
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.text import reason_of
from asyncrl.tools import Tool, ToolRefusal
from asyncrl.types import Task, Trajectory
from tests.launch.preflight.test_preflight import config_of


class Lookup(Tool):
    schema: ClassVar[Mapping[str, Any]] = {
        "name": "lookup",
        "description": "Look up a word",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    }
    words: ClassVar[Mapping[str, str]] = {}

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        return self.words[arguments["word"]]


class Careful(Lookup):
    async def execute(self, arguments: Mapping[str, Any]) -> str:
        if arguments["word"] not in self.words:
            raise ToolRefusal("there is no such word")
        return self.words[arguments["word"]]


class Wandering(Lookup):
    async def execute(self, arguments: Mapping[str, Any]) -> str:
        os.chdir("/")
        return "the root"


class Slow(Lookup):
    limits: ClassVar[dict[float, asyncio.Timeout]] = {}

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        self.limits[TRIAL_S].reschedule(0)
        await asyncio.Event().wait()
        return ""


class Misspelt:
    def reset(self) -> None:
        self.board = [0]

    def move(self, cell: int) -> str:
        """Take a cell.

        Args:
            cell: the cell
        """
        return str(self.bord[cell])  # type: ignore[attr-defined]

    def get_reward(self) -> float:
        return 0.0


class Strict(Misspelt):
    def move(self, cell: int) -> str:
        """Take a cell.

        Args:
            cell: the cell
        """
        raise ValueError(f"there is no cell {cell}")


class NoReward(Strict):
    def get_reward(self) -> float:
        return 1 / len(self.board[1:])


def broken(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(task.extra_info["difficulty"])


def in_a_process(task, answer, trajectory):  # type: ignore[no-untyped-def]
    assert "ASYNCRL_JUDGE" in os.environ
    return task.extra_info["difficulty"]


def strict(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(float(answer) == float(task.truth_text))


def reads_the_id(task: Task, answer: str, trajectory: Trajectory) -> float:
    _, member, _ = trajectory.id.split(".")
    return float(member)


def wordy(task: Task, answer: str, trajectory: Trajectory) -> str:
    return "good"


def generous(task: Task, answer: str, trajectory: Trajectory) -> float:
    return 1.0


def inverted(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(answer != task.truth_text)


def right(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(answer == task.truth_text)


async def ask(task: Task, base_url: str, api_key: str) -> float:
    return 0.0


def slow(task: Task, answer: str, trajectory: Trajectory) -> float:
    raise TimeoutError


class InThisProcess:
    """Judges like a Verifier, without its processes."""

    def __init__(self, scoring: ScoringConfig) -> None:
        self._rules = load_rules(scoring)

    def submit(self, given: RuleInput) -> Future[RuleScores]:
        future: Future[RuleScores] = Future()
        try:
            future.set_result(self._rules.score(given))
        except ScoringError as error:
            future.set_exception(error)
        except TimeoutError as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a rule may raise anything
            future.set_exception(ScoringError(f"the rule raised {reason_of(error)}"))
        return future

    def close(self) -> None:
        pass


def check(config: TrainConfig) -> None:
    """The check of `preflight`, but without processes of a verifier."""
    judge = EpisodeJudge(config.scoring, partial(InThisProcess, config.scoring))  # type: ignore[arg-type]
    stage = TrialStage(partial(open_tokenizer, config.model), partial(open_chat, config), partial(open_runner, config))
    check_episodes(config.actor, [TaskFile(config.data.train)], stage, judge)


def refusal(config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        check(config)
    return str(refused.value)


def own(name: str) -> str:
    return f"{__name__}.{name}"


def test_a_tool_that_fails_does_not_start_and_its_line_and_the_call_are_named(tmp_path: Path):
    config = config_of(tmp_path, "hermes3", ["user"], [own("Lookup")])
    config.actor.tool_retries = 0
    said = refusal(config)
    assert "KeyError: '1'" in said
    assert "test_episode.py, line" in said
    assert 'made-up arguments {"word": "1"}' in said
    config.actor.tools = [own("Careful")]
    check(config)


def test_a_tool_that_changes_the_working_directory_does_not_move_the_run(tmp_path: Path):
    config, before = config_of(tmp_path, "hermes3", ["user"], [own("Wandering")]), Path.cwd()
    check(config)
    assert Path.cwd() == before


def test_an_environment_whose_code_is_wrong_does_not_start_but_one_that_refuses_a_move_does(tmp_path: Path):
    config = config_of(tmp_path, "hermes3", ["user"], [])
    config.actor.environment = own("Misspelt")
    said = refusal(config)
    assert "has no attribute 'bord'" in said
    assert "test_episode.py, line" in said
    config.actor.environment = own("NoReward")
    assert "get_reward of environment NoReward failed: ZeroDivisionError" in refusal(config)
    config.actor.environment = own("Strict")
    check(config)


def test_a_rule_that_fails_for_every_answer_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = own("broken")
    said = refusal(config)
    assert "KeyError: 'difficulty'" in said
    assert said.count("test_episode.py, line") == 2  # The line of the function, and the line that raised.
    config.scoring.rule = own("reads_the_id")
    check(config)
    config.scoring.rule = own("wordy")
    assert "it must be a finite number" in refusal(config)


@pytest.mark.slow
def test_a_start_judges_the_episode_in_the_processes_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, "phi4", ["user"], [])
    # Not of this file: the process would load all that a test loads.
    (tmp_path / "own_rules.py").write_text(f"import os\n\n\n{inspect.getsource(in_a_process)}")
    monkeypatch.syspath_prepend(tmp_path)
    config.scoring.rule = "own_rules.in_a_process"
    with pytest.raises(ConfigError, match=r"the rule raised KeyError: 'difficulty' \(\S*own_rules\.py, line \d+\)"):
        preflight(config)


def test_a_rule_that_fails_only_for_a_wrong_answer_starts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = own("strict")
    check(config)
    [warned] = [each.getMessage() for each in caplog.records if each.name == "asyncrl.train"]
    assert "for the answer 'I do not know.' the rule raised ValueError" in warned


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("generous", "the reward is 1, and for 'I do not know.' it is 1 too: a rule that scores all answers alike"),
        ("inverted", "the reward is 0, and for 'I do not know.' it is higher, 1: mend the rule"),
        ("right", ""),
    ],
)
def test_a_rule_that_does_not_prefer_the_ground_truth_starts_with_a_warning(
    rule: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = own(rule)
    check(config)
    warned = [each.getMessage() for each in caplog.records if each.name == "asyncrl.train"]
    assert len(warned) == bool(said)
    assert all(said in each and "for the ground truth" in each for each in warned)


def test_an_episode_that_takes_too_long_is_left_out_with_its_row_and_what_was_called_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    limited = asyncio.timeout

    def timeout(delay: float) -> asyncio.Timeout:
        Slow.limits[delay] = limited(delay)
        return Slow.limits[delay]

    caplog.set_level(logging.INFO, "asyncrl.train")
    config = config_of(tmp_path, "hermes3", ["user"], [own("Slow")])
    config.actor.tool_timeout_s = 600.0
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "timeout", timeout)
        check(config)
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = own("slow")
    check(config)
    tool, rule = (each.getMessage() for each in caplog.records if each.name == "asyncrl.train")
    assert "took over 10 s, so it is left out of the checks; the tool lookup was called last and may be slow" in tool
    assert "the rule was called last" in rule
    assert "row 0" in tool


def test_an_agent_is_not_played_and_a_debug_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.actor.agent, config.scoring.rule = own("ask"), own("broken")
    caplog.set_level(logging.DEBUG, "asyncrl.train")
    check(config)
    assert "an agent needs a served model" in caplog.text


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "string"}, "1"),
        ({"type": "integer", "minimum": 3}, 3),
        ({"enum": ["left", "right"]}, "left"),
        ({"type": "array", "items": {"type": "number"}}, [1]),
        ({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}, {"x": True}),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
    ],
)
def test_made_up_arguments_fit_their_schema(schema: Mapping[str, Any], made: Any):
    parameters = {"type": "object", "properties": {"given": schema, "more": {}}, "required": ["given"]}
    assert made_up_arguments({"name": "f", "parameters": parameters}) == {"given": made}


def test_no_arguments_are_made_up_for_an_object_of_unknown_fields():
    parameters = {"type": "object", "properties": {"given": {"type": "object"}}, "required": ["given"]}
    assert made_up_arguments({"name": "f", "parameters": parameters}) is None
