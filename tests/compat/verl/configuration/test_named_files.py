"""Files, functions, classes and variables that do not exist are named at the translation, with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate

FUNCTION = "reward.custom_reward_function"
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
MANAGER = "reward.reward_manager"
OWN_MANAGER = [f"{MANAGER}.source=importlib"]
REWARDS = """
import json
try:
    from somewhere import fast_score
except ImportError:
    fast_score = None
LIMIT: int = 3


def compute_scores(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


class Manager:
    pass
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def from_words(*words: str, **environment: str) -> Translated:
    return translate(read_verl(None, words, environment))


def has(result: Translated, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in result.differs)


@pytest.mark.parametrize("name", ["compute_scores", "fast_score", "json", "LIMIT", "Manager"])
def test_a_function_that_its_file_defines_imports_or_assigns_is_not_mentioned(name: str) -> None:
    assert not has(from_words(f"{FUNCTION}.path=rewards.py", f"{FUNCTION}.name={name}"), "rewards.py")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([f"{FUNCTION}.path=rewards.py"], f"{FUNCTION}.name=compute_score: rewards.py has no compute_score; did you "),
        ([f"{FUNCTION}.path=reward.py"], f"{FUNCTION}.path=reward.py: there is no such file; did you mean rewards.py?"),
        ([f"{FUNCTION}.path=sub/x.py"], "there is no such file; a relative path begins in the folder in which you"),
        ([f"{FUNCTION}.path=broken.py"], "name=compute_score: line 1 of broken.py: "),
        ([*OWN_MANAGER, f"{MANAGER}.name=Managr", f"{MANAGER}.module.path=rewards.py"], "did you mean Manager?"),
        ([*OWN_MANAGER, f"{MANAGER}.name=M", f"{MANAGER}.module.path=rewards2.py"], "did you mean rewards.py?"),
        (["data.custom_cls.path=rewards.py", "data.custom_cls.name=Managers"], "custom_cls.name=Managers: rewards.py"),
        ([f"{TURNS}.enable=true", f"{TURNS}.tool_config_path=tols.yaml"], "tool_config_path=tols.yaml: there is no"),
        ([f"{TURNS}.enable=true", f"{TURNS}.function_tool_path=reward.py"], "tool_path=reward.py: there is no such"),
        ([f"{TURNS}.enable=true", f"{TURNS}.interaction_config_path=u.yaml"], "config_path=u.yaml: there is no such"),
        ([f"{ROLLOUT}.agent.agent_loop_config_path=loop.yaml"], "config_path=loop.yaml: there is no such file"),
        ([f"{ROLLOUT}.agent.default_agent_loop=rewards.Managers"], "rewards.py has no Managers; did you mean Manager?"),
    ],
)
def test_what_does_not_exist_is_named_with_what_is_near(words: list[str], line: str) -> None:
    Path("broken.py").write_text("def (:\n")
    assert has(from_words(*words), line)


def test_a_file_that_imports_all_names_of_another_may_have_any() -> None:
    Path("all.py").write_text("from rewards import *\n")
    assert not has(from_words(f"{FUNCTION}.path=all.py"), "all.py")


def test_classes_of_tools_and_loops_are_looked_for_in_the_folder() -> None:
    Path("tools.yaml").write_text("tools: [{class_name: rewards.Managers, config: {type: native}}]\n")
    Path("loops.yaml").write_text("[{name: mine, _target_: rewards.Looper}]\n")
    tools = from_words(f"{TURNS}.enable=true", f"{TURNS}.tool_config_path=tools.yaml")
    assert has(
        tools, "tool_config_path: class_name=rewards.Managers: rewards.py has no Managers; did you mean Manager?"
    )
    loops = from_words(f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml")
    assert has(loops, "agent_loop_config_path: _target_=rewards.Looper: rewards.py has no Looper")
    Path("loops.yaml").write_text("mine: rewards.Manager\n")
    assert has(from_words(f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml"), "it must be a list of loops")


@pytest.mark.parametrize("path", ["rewards.py", "file://rewards.py", "~/rewards.py", "deep/er/rewards.py"])
def test_a_manager_of_a_file_is_named_by_file_and_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = [f"{MANAGER}.source=importlib", f"{MANAGER}.name=Manager", f"{MANAGER}.module.path={path}"]
    expected = path.removeprefix("file://").replace("~", "/home/me")
    assert from_words(*words).settings["scoring.manager.name"] == f"{expected}:Manager"


def test_variables_of_the_environment_are_expanded_in_words_and_others_are_named() -> None:
    result = from_words(
        "data.train_files=[$DATA/a.parquet,${DATA}/b.parquet]",
        "trainer.experiment_name=$USER_NAME-${RUN:-first}",
        "data.val_files=$NOWHERE/test.parquet",
        "trainer.project_name=${trainer.experiment_name}",
        "actor_rollout_ref.model.target_modules='.*proj$'",
        DATA="/data",
        USER_NAME="me",
    )
    assert result.settings["data.train"] == ["/data/a.parquet", "/data/b.parquet"]
    assert result.settings["run.name"] == result.settings["observe.project"] == "me-first"
    assert "data.eval" not in result.settings
    assert has(result, "data.val_files", "the environment does not set this variable: $NOWHERE/test.parquet")


def test_what_a_variable_holds_is_not_expanded_again() -> None:
    result = from_words("trainer.experiment_name=x$A", A="$B", B="secret")
    assert result.settings["run.name"] == "x-B"


@pytest.mark.parametrize(
    ("word", "shown", "wanted"),
    [
        ("data.train_batch_size=many", "'many'", "a whole number"),
        ("data.train_batch_size=[1,2]", "[1, 2]", "a whole number"),
        ("actor_rollout_ref.rollout.temperature=hot", "'hot'", "a number"),
    ],
)
def test_a_value_that_is_no_number_is_told_with_its_key_and_what_it_must_be(word: str, shown: str, wanted: str) -> None:
    key = word.partition("=")[0]
    assert has(from_words(word), f"{key}: its value cannot be read (it is {shown}, and must be {wanted})")


def test_a_table_of_generations_has_its_line() -> None:
    result = from_words("trainer.log_val_generations=600")
    assert has(result, "trainer.log_val_generations=600: services in observe.sinks", "a table of 512 held-out episodes")
