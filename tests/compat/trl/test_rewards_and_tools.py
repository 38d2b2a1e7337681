"""Rewards and tools of a script are translated or reported, and nothing of asyncrl takes their place silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat.trl.command import translate, translated
from asyncrl.compat.trl.source import read_trl
from asyncrl.compat.trl.values import Named
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.registry import load_rules
from tests.compat.trl.scripts import has, loaded, of_script


def test_rewards_that_other_functions_make_have_the_name_of_their_variable(tmp_path: Path) -> None:
    given = of_script(
        tmp_path,
        "soft = make(80)\nshort = lambda completions, **kwargs: [0.0]\nrewards = [soft, short]\n"
        "GRPOTrainer('m', reward_funcs=rewards)\n",
    )
    assert [each["name"] for each in translate(given).settings["scoring.rule"]] == ["script.soft", "script.short"]


def test_a_reward_without_a_name_is_reported_and_the_others_are_kept(tmp_path: Path) -> None:
    given = of_script(
        tmp_path,
        "from trl.rewards import accuracy_reward, think_format_reward\n"
        "GRPOTrainer('m', [accuracy_reward, think_format_reward, lambda completions, **kwargs: [0.0]],\n"
        "  GRPOConfig('o', reward_weights=[1.0, 0.5, 0.25], multi_objective_aggregation='normalize_then_sum'))\n",
    )
    result = translate(given)
    assert [(each["as"], each["weight"]) for each in result.settings["scoring.rule"]] == [
        ("accuracy_reward", 1.0),
        ("think_format_reward", 0.5),
    ]
    weights = {"rule/accuracy_reward": 1.0, "rule/think_format_reward": 0.5}
    assert result.settings["algorithm.advantage"]["params"] == {"weights": weights}
    assert has(result.differs, "lambda completions, **kwargs: [0.0] is left out", "weight: 0.25")


@pytest.mark.parametrize("rewards", ["[lambda completions: [0.0]]", "make_rewards()", "[*rewards]", "changed", "None"])
def test_without_a_reward_a_run_is_refused_and_does_not_use_the_default_rule(tmp_path: Path, rewards: str) -> None:
    result = translate(
        of_script(tmp_path, f"changed = []\nchanged.append(f)\nGRPOTrainer('m', reward_funcs={rewards})\n")
    )
    assert result.settings["scoring.rule"] == "MODULE.FUNCTION"
    assert has(result.differs, "no function is known", "scoring.rule=my_rewards.correct")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_rules(ScoringConfig(rule=result.settings["scoring.rule"]))


@pytest.mark.slow
def test_the_rewards_of_a_model_or_of_an_environment_leave_the_default_rule_out() -> None:
    rules: list[tuple[dict[str, Any], str | None]] = [
        ({"reward_funcs": "org/reward-model"}, None),
        ({"environment_factory": Named("games.Maze")}, "environment"),
    ]
    for given, rule in rules:
        settings = translate(given).settings
        assert settings["scoring.rule"] == rule, "the default rule fails without a number as ground truth"
        assert "scoring.shaping.environment_weight" not in settings, "the reward would count twice"
    both = translate({"environment_factory": Named("games.Maze"), "reward_funcs": [Named("my.score")]}).settings
    assert (both["scoring.rule"], both["scoring.shaping.environment_weight"]) == ("my.score", 1.0)
    _, report = translated(None, ["model=m", "dataset_name=d", "reward_funcs=org/reward-model"], None)
    assert not has(report, "Fix before you start a run")


@pytest.mark.parametrize(
    "given",
    [
        {"reward_funcs": ["org/rm", Named("my.right")]},
        {"reward_model_name_or_path": "org/rm", "reward_funcs": [Named("my.right")]},
    ],
)
def test_a_reward_model_has_its_weight(given: dict[str, Any]) -> None:
    result = translate({**given, "reward_weights": [0.1, 2.0]})
    assert result.settings["scoring.outcome_model.path"] == "org/rm"
    assert result.settings["scoring.shaping.outcome_model_weight"] == 0.1
    assert result.settings["scoring.rule"] == [{"name": "my.right", "weight": 2.0}]
    assert "scoring.shaping.outcome_model_weight" not in translate(given).settings, "the default is 1, as in TRL"
    separate = translate(
        {**given, "reward_weights": [0.1, 2.0], "multi_objective_aggregation": "normalize_then_sum"}
    ).settings
    assert separate["algorithm.advantage"]["params"] == {"weights": {"outcome_model": 0.1, "rule/right": 2.0}}


def test_a_second_reward_model_is_reported_and_a_negative_weight_is_refused() -> None:
    result = translate({"reward_funcs": ["org/rm-a", "org/rm-b", Named("my.right")], "reward_weights": [1.0, 0.5, 2.0]})
    assert result.settings["scoring.outcome_model.path"] == "org/rm-a"
    assert has(result.differs, "org/rm-b is left out", "weight: 0.5")
    words = ["model=m", "dataset_name=d", "reward_funcs=[org/rm]", "reward_weights=[-1.0]"]
    _, report = translated(None, words, None)
    assert has(report, "the model org/rm has the weight -1.0")
    assert has(report, "scoring.shaping.outcome_model_weight=-1.0")


MAZE = """
class Maze:
    def reset(self): ...
    def move(self, direction): ...
"""


@pytest.mark.parametrize(
    ("maze", "weight"),
    [
        (MAZE, None),
        (f"{MAZE}    def get_reward(self): ...\n", 1.0),
        (f"{MAZE}    get_reward = score\n", 1.0),
        (MAZE.replace("Maze", "Maze(Game)"), 1.0),
    ],
)
@pytest.mark.parametrize("place", ["script", "module", "elsewhere"])
def test_the_rewards_of_an_environment_get_a_weight_only_if_it_may_give_some(
    tmp_path: Path, maze: str, weight: float | None, place: str
) -> None:
    (tmp_path / "games").mkdir()
    if place != "elsewhere":
        (tmp_path / "games" / "mazes.py").write_text(maze)
    head = maze if place == "script" else "from games.mazes import Maze\n"
    trainer = "GRPOTrainer('m', reward_funcs=score, environment_factory=Maze)\n"
    settings = translate(of_script(tmp_path, f"def score(completions): ...\n{head}{trainer}")).settings
    assert settings.get("scoring.shaping.environment_weight") == (1.0 if place == "elsewhere" else weight)


@pytest.mark.slow
def test_a_script_without_tools_gets_no_calculator(tmp_path: Path) -> None:
    config, report = loaded("grpo_gsm8k.py", tmp_path)
    assert config.actor.tools == []
    assert has(report, "actor.tools=[]", "the calculator")
    given = of_script(tmp_path, "def search(query): ...\nGRPOTrainer('m', tools=[search, lambda x: x])\n")
    result = translate(given)
    assert result.settings["actor.tools"] == []
    assert has(result.differs, "tools=search, lambda x: x:", "actor.environment", "Tool class")
    assert "actor.tools" not in translate({"environment_factory": Named("games.Maze")}).settings


@pytest.mark.parametrize(
    ("head", "foot", "effects"),
    [
        ("import trl.rewards\nfrom peft import LoraConfig", "", "would need peft, trl: move this definition"),
        ("", "trainer.train()", "would start its training: move"),
        ("import datasets", "trainer.train()", "would start its training and need datasets: move"),
    ],
)
def test_a_reward_in_the_training_script_must_move(tmp_path: Path, head: str, foot: str, effects: str) -> None:
    (tmp_path / "nix.py").write_text(
        f"{head}\ndef score(completions): ...\ntrainer = GRPOTrainer('m', reward_funcs=score)\n{foot}\n"
    )
    _, remarks = read_trl(tmp_path / "nix.py", [])
    assert has(remarks, "nix.score: importing nix.py", effects, "such as my_nix.py")


def test_a_reward_in_a_script_without_packages_of_training_can_stay(tmp_path: Path) -> None:
    (tmp_path / "nix.py").write_text(
        "import re\ndef score(completions): ...\ndef main():\n  import trl\n"
        "  trl.GRPOTrainer('m', reward_funcs=score).train()\n"
    )
    assert read_trl(tmp_path / "nix.py", [])[1] == []
