"""Before anything starts: an episode under a script finds tools, environments and rules that always fail."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.scoring import OutcomeModelConfig, ScoringModelConfig
from asyncrl.data.reading import TaskFile
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.preflight.episodes.episode import ManagerTrial, check_episodes
from asyncrl.launch.preflight.episodes.made_up import made_up_arguments
from asyncrl.launch.preflight.trial import TRIAL_S, TrialProcess
from asyncrl.scoring.models import StepScores
from asyncrl.scoring.transcript import Transcript
from asyncrl.tools import Tool, ToolRefusal
from asyncrl.types import Task, Trajectory
from tests.launch.preflight.in_process import InThisProcess
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


def strict(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(float(answer) == float(task.truth_text))


def reads_the_id(task: Task, answer: str, trajectory: Trajectory) -> float:
    _, member, _ = trajectory.id.split(".")
    return float(member)


def wordy(task: Task, answer: str, trajectory: Trajectory) -> str:
    return "good"


def generous(task: Task, answer: str, trajectory: Trajectory) -> float:
    return 1.0


def mute(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    return [None for _ in completions]


def loud(task: Task, answer: str, trajectory: Trajectory) -> float:
    raise ValueError("red \x1b[31m")


def inverted(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(answer != task.truth_text)


def right(task: Task, answer: str, trajectory: Trajectory) -> float:
    return float(answer == task.truth_text)


async def ask(task: Task, base_url: str, api_key: str) -> float:
    return 0.0


def no_steps(task: Task) -> list[float]:
    return [1.0] * len(task.extra_info["results"])


def even_steps(task: Task, texts: Sequence[str]) -> list[float]:
    return [0.5 for _ in texts]


def broken_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return float(extra_info["difficulty"])


def plain_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return 1.0


class Unmade:
    def __init__(self, tokenizer: Any, num_examine: int, compute_score: Any = None) -> None:
        raise OSError("no licence")

    def __call__(self, data: Any) -> Any: ...


class Even:
    """A process reward model without a checkpoint."""

    name = "even"

    def __init__(self, config: ScoringModelConfig) -> None:
        self.value = float(config.params.get("value", 0.5))

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        return [
            StepScores.of_probabilities([self.value] * sum(each.is_step for each in passages))
            for passages in transcripts
        ]


class Absent(Even):
    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        raise UnavailableError("the server of the model is not there yet")


class Silent:
    name = "silent"

    def __init__(self, config: OutcomeModelConfig) -> None:
        if config.path is not None:
            raise OSError("loads for minutes")

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        return []


def check(config: TrainConfig, limit_s: float = TRIAL_S) -> None:
    """The check of `preflight`, with the user's code in this process."""
    with (
        closing(TrialProcess(values_of(config), open_pool=InThisProcess, limit_s=limit_s)) as trial,
        closing(ManagerTrial(config.scoring, config.model, None)) as managers,
    ):
        check_episodes(config.actor, config.scoring, [TaskFile(config.data.train)], trial, managers)


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


@pytest.mark.slow
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


def test_a_rule_that_returns_none_for_every_episode_is_named_with_its_line_before_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = [{"name": own("right")}, {"name": own("mute"), "as": "bonus"}]
    check(config)
    [warned] = [each.getMessage() for each in caplog.records if each.name == "asyncrl.train"]
    assert warned.startswith(f"scoring.rule: {own('mute')} (")
    assert "test_episode.py, line" in warned
    assert "returned None for all episodes that were tried before the start, first with " in warned
    assert "row 0" in warned
    config.scoring.rule = own("mute")
    said = refusal(config)
    assert "mute returned None; one must give a reward" in said
    assert "test_episode.py, line" in said


def test_the_reason_of_a_rule_that_fails_has_no_effect_on_the_terminal(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = own("loud")
    assert "red \N{REPLACEMENT CHARACTER}[31m" in refusal(config)


def test_an_episode_that_takes_too_long_is_left_out_with_its_row_and_the_line_of_what_was_called_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    limited = asyncio.timeout

    def timeout(delay: float) -> asyncio.Timeout:
        Slow.limits[delay] = limited(delay)
        return Slow.limits[delay]

    config = config_of(tmp_path, "hermes3", ["user"], [own("Slow")])
    config.actor.tool_timeout_s = 600.0
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "timeout", timeout)
        check(config)
    [said] = (each.getMessage() for each in caplog.records if each.name == "asyncrl.train")
    assert "row 0" in said
    assert "took over 10 s, so it is left out of the checks; the tool lookup (" in said
    assert said.count("test_episode.py, line") == 2  # The line of the class, and the line that waits.


def test_a_function_of_step_rewards_that_fails_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.steps = own("no_steps")
    said = refusal(config)
    assert said.startswith("scoring.steps: ")
    assert "KeyError: 'results'" in said
    assert said.count("test_episode.py, line") == 3
    config.scoring.steps = own("even_steps")
    check(config)


def test_a_model_of_the_users_own_that_fails_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.prm.family = own("Even")
    check(config)
    config.scoring.prm.params = {"value": 2.0}
    said = refusal(config)
    assert said.startswith(f"scoring.prm.family: {own('Even')} (")
    assert "outside [0, 1]" in said
    config.scoring.prm.params = {"value": "half"}
    said = refusal(config)
    assert "could not convert string to float: 'half'" in said
    assert said.count("test_episode.py, line") == 2
    config.scoring.prm = ScoringModelConfig(family=own("Absent"))
    check(config)  # A server that does not answer yet is no mistake in the class.


@pytest.mark.slow
def test_a_model_with_a_path_or_on_a_gpu_is_not_loaded_by_the_check(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.outcome_model.family = own("Silent")
    assert "silent gave [] for 1 episodes" in refusal(config)
    config.scoring.outcome_model.path = "some/model"
    check(config)
    config.scoring.outcome_model.path, config.scoring.outcome_model.device = None, "cuda"
    check(config)


@pytest.mark.heavy
def test_a_reward_manager_that_fails_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.manager.name, config.scoring.manager.compute_score = "naive", own("broken_score")
    said = refusal(config)
    assert said.startswith(f"scoring.manager: {own('broken_score')} (")
    assert "the reward manager raised KeyError: 'difficulty'" in said
    assert said.count("test_episode.py, line") == 2
    config.scoring.manager.compute_score = own("plain_score")
    check(config)
    config.scoring.manager.name, config.scoring.manager.compute_score = own("Unmade"), None
    assert "it cannot be made: OSError: no licence (" in refusal(config)


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
