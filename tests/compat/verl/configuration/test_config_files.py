"""The files that Hydra's options and `defaults` name are read where they are, and named where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncrl.compat.verl.configuration.command import main, translated
from asyncrl.compat.verl.configuration.script import NamedConfig, script_configuration
from asyncrl.compat.verl.configuration.source import read_noting
from asyncrl.errors import ConfigError

HERE = Path(__file__).parent
SEVERAL_TURNS = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults:
  - ppo_trainer
  - rollout@actor_rollout_ref.rollout: mine
  - _self_
data: {max_prompt_length: 1024}
"""
MINE = "{name: sglang, n: 4, multi_turn: {enable: true, max_assistant_turns: 5}}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "settings" / "rollout").mkdir(parents=True)
    (tmp_path / "settings" / "several_turns.yaml").write_text(SEVERAL_TURNS)
    (tmp_path / "settings" / "rollout" / "mine.yaml").write_text(MINE)
    return tmp_path


def read(file: Path | None, named: NamedConfig, environment: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    given, missing = read_noting(file, [], environment, named)
    rollout = given.get("actor_rollout_ref", {}).get("rollout", {})
    turns = rollout.get("multi_turn", {}).get("max_assistant_turns")
    return {"prompt": given.get("data", {}).get("max_prompt_length"), "turns": turns, "n": rollout.get("n")}, missing


def test_a_script_is_read_with_the_file_that_its_options_name_and_its_words_win(project: Path) -> None:
    script = HERE / "multi_turn_gsm8k.sh"
    found, missing = read(script, NamedConfig(), {"PWD": str(project)})
    assert (found, missing) == ({"prompt": 1024, "turns": 5, "n": 8}, [])


def test_a_folder_of_options_may_be_relative_to_the_script(project: Path) -> None:
    for option in ("--config-path=settings --config-name=several_turns.yaml", "-cp settings -cn several_turns"):
        (project / "run.sh").write_text(f"# --config-name=old\npython3 -m verl.trainer.main_ppo {option} data.seed=1")
        assert read(project / "run.sh", NamedConfig(), {}) == ({"prompt": 1024, "turns": 5, "n": 4}, [])


@pytest.mark.slow
def test_the_command_takes_the_options_of_verls_own_command(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    main(["--config-path=settings", "--config-name", "several_turns", "actor_rollout_ref.rollout.n=2"])
    printed = capsys.readouterr().out
    assert "max_prompt_length: 1024" in printed
    assert "max_turns: 5" in printed
    assert "group_size: 2" in printed
    with pytest.raises(ConfigError, match="name one configuration file"):
        main(["settings/several_turns.yaml", "--config-name=several_turns"])


def test_a_misspelt_name_of_a_file_is_refused_with_the_name_that_was_meant(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    meant = r"--config-name=several_turn: there is no such file in settings; did you mean several_turns\?"
    with pytest.raises(ConfigError, match=meant):
        main(["--config-path=settings", "--config-name=several_turn"])


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named_and_one_that_verl_ships_is_not(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo --config-path=conf --config-name=multiturn trainer.nnodes=1")
    [told] = [line for line in translated(script, [], None)[1] if "--config-name" in line]
    assert told.startswith("Not read: --config-name=multiturn: there is no such file in conf.")
    script.write_text("python3 -m verl.trainer.main_ppo --config-name ppo_trainer.yaml trainer.nnodes=1")
    assert not any("Not read" in line for line in translated(script, [], None)[1])
    (tmp_path / "own.yaml").write_text(
        "defaults: [ppo_trainer, {optional data: mine}, {actor: dp_actor}, {data: none_such}]"
    )
    _, [missing] = read_noting(tmp_path / "own.yaml", [], {})
    assert missing.endswith("own.yaml includes data/none_such, which is not there")


def test_defaults_read_no_file_outside_the_folder_and_end_where_a_file_names_itself(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.yaml").write_text("data: {seed: 7}")
    (inside / "own.yaml").write_text(f"defaults: [../secret, {tmp_path}/secret]")
    given, missing = read_noting(inside / "own.yaml", [], {})
    assert (given, len(missing)) == ({}, 2)
    (inside / "loop.yaml").write_text("defaults: [loop]")
    with pytest.raises(ConfigError, match="or a file names itself"):
        read_noting(inside / "loop.yaml", [], {})


def test_the_last_file_of_a_script_counts_and_options_without_a_value_do_not() -> None:
    text = "run --config-name=a --config-path=b x.y=1\nrun --config-name c --config-path"
    assert script_configuration(text, {})[1] == NamedConfig("c", "b")
