"""Each key of verl that is changed from its default becomes a setting or a line of the report."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.sections import Section, leaves, set_key
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.table import TABLE
from asyncrl.compat.verl.configuration.translation import translate

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
USUAL = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": True,
    "algorithm.filter_groups.enable": True,
    f"{ACTOR}.use_kl_loss": True,
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.multi_turn.enable": True,
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "org/model",
    "trainer.test_freq": 5,
}
"""A configuration with many features, some of which hide others."""


def of(values: Mapping[str, Any]) -> Translated:
    given: Section = {}
    for key, value in values.items():
        set_key(given, key, value)
    return translate(given)


def other(value: Any) -> Iterator[Any]:
    """Values that differ from `value`."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value + 7
        case None:
            yield from ("something", 5)
        case str():
            yield "something"
        case list():
            yield ["something"]
        case _:
            yield {"something": 1}


def silent(defaults: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """The keys with another value than the default that changes neither a setting nor a line."""
    before = of(base)
    seen = (before.settings, [*before.report])
    found = []
    for key, default in defaults.items():
        for value in other(default):
            result = of({**base, key: value})
            if (result.settings, [*result.report]) == seen:
                found.append(f"{key}={value}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("base", [{}, pytest.param(USUAL, marks=pytest.mark.heavy)], ids=["plain", "usual"])
def test_a_key_of_the_table_is_never_without_effect_and_word(base: Mapping[str, Any]) -> None:
    defaults = {key: value for row in TABLE for key, value in row.defaults.items() if key not in base}
    assert silent(defaults, base) == []


@pytest.mark.slow
@pytest.mark.skipif("ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl")
@pytest.mark.parametrize("engine", ["", "_megatron", "_torchtitan", "_veomni"])
def test_no_key_of_verls_own_configurations_is_without_effect_and_word(engine: str) -> None:
    command = [os.environ["ASYNCRL_VERL_PYTHON"], "-c", "import importlib.util as u; print(u.find_spec('verl').origin)"]
    home = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).parent
    content = yaml.safe_load((home / f"trainer/config/_generated_ppo{engine}_trainer.yaml").read_text())
    assert not translate(content).idle, "verl's defaults need no line"
    defaults = {key: value for key, value in leaves(content) if "_target_" not in key and not key.startswith("hydra")}
    assert silent({key: value for key, value in defaults.items() if key not in USUAL}, USUAL) == []


def test_a_value_that_other_values_hide_is_told_with_what_it_is_for() -> None:
    words = ["reward.num_workers=32", "algorithm.adv_estimator=grpo", "algorithm.lam=0.9", "data.seed=1"]
    lines = translate(read_verl(None, words, {})).idle
    assert lines == (
        "reward.num_workers=32, for scoring.rule_processes: Only with remote.",
        "algorithm.lam=0.9, for algorithm.advantage: lam of gae.",
    )
    assert not translate(read_verl(None, ["algorithm.adv_estimator=gae", "algorithm.lam=0.9"], {})).idle


def test_of_two_keys_that_ask_for_the_same_only_one_can_be_left_out() -> None:
    words = [
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    ]
    assert len(translate(read_verl(None, words, {})).idle) == 1


def test_several_greedy_attempts_of_verl_are_said_to_be_sampled() -> None:
    of_validation = "actor_rollout_ref.rollout.val_kwargs"
    said = "several attempts are sampled at actor.temperature"
    greedy = translate(read_verl(None, [f"{of_validation}.n=4"], {}))
    assert greedy.settings["learner.eval_attempts"] == 4
    assert any(said in line for line in greedy.differs)
    sampled = translate(read_verl(None, [f"{of_validation}.n=4", f"{of_validation}.do_sample=true"], {}))
    assert not any(said in line for line in sampled.differs)
    assert not any("do_sample" in line for line in sampled.idle)


def test_a_batch_of_the_data_loader_is_no_oversampling() -> None:
    words = ["data.gen_batch_size=512", "data.train_batch_size=128"]
    plain = translate(read_verl(None, words, {}))
    assert "replay.oversample" not in plain.settings
    assert any("data.gen_batch_size=512: left out, so a step trains" in line for line in plain.differs)
    filtered = translate(read_verl(None, [*words, "algorithm.filter_groups.enable=true"], {}))
    assert filtered.settings["replay.oversample"] == 4


def test_the_loop_with_tools_has_them_without_a_further_word(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: mine.Tool, config: {type: native}}]\n")
    turns = f"{ROLLOUT}.multi_turn"
    words = [f"{turns}.tool_config_path={file}", f"{turns}.max_assistant_turns=3"]
    without = translate(read_verl(None, words, {}))
    assert without.settings["actor.tools"] == []
    assert any(f"{turns}.tool_config_path={file}: left out" in line for line in without.differs)
    loop = f"{ROLLOUT}.agent.default_agent_loop=tool_agent"
    settings = translate(read_verl(None, [*words, loop], {})).settings
    assert settings["actor.verl_tools"] == [{"class_name": "mine.Tool", "config": {"type": "native"}}]
    assert settings["actor.max_turns"] == 3


def test_parameters_of_the_chat_template_are_kept() -> None:
    words = ["+data.apply_chat_template_kwargs.enable_thinking=False"]
    result = translate(read_verl(None, words, {}))
    assert result.settings["actor.template_kwargs"] == {"enable_thinking": False}
    assert not result.unknown
