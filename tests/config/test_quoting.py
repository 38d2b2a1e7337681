"""Values of Python become words of the command line; functions and classes become their names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.config.compose import read
from asyncrl.config.quoting import as_word
from asyncrl.errors import ConfigError


def score(task: Any, answer: str, trajectory: Any) -> float:
    return 0.0


class Lookup:
    def method(self) -> None: ...


def test_a_function_or_class_becomes_its_name_in_lists_and_mappings_too() -> None:
    given = {
        "scoring.rule": [{"name": score, "weight": 0.5}, "gsm8k"],
        "actor.tools": [Lookup],
        "scoring.rules": {"sums": score},
    }
    words = [as_word(key, value) for key, value in given.items()]
    config = read([*words, "model.path=m", "data.train=README.md"])
    assert config.scoring.rule == [{"name": f"{__name__}.score", "weight": 0.5}, "gsm8k"]
    assert config.scoring.rules == {"sums": f"{__name__}.score"}
    assert config.actor.tools == [f"{__name__}.Lookup"]


def test_code_that_other_processes_cannot_import_is_refused_with_where_to_put_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def local() -> float:
        return 0.0

    def of_script() -> float:
        return 0.0

    of_script.__module__, of_script.__qualname__ = "__main__", "of_script"
    monkeypatch.setattr(sys.modules["__main__"], "of_script", of_script, raising=False)
    named = {local: "local", of_script: "of_script", (lambda: 0.0): "NAME", Lookup().method: "method"}
    for value, name in named.items():
        with pytest.raises(
            ConfigError, match=rf"import it by name: .* such as my_rewards.py, and pass my_rewards.{name}$"
        ):
            as_word("scoring.rule", [value])


def test_a_module_that_only_the_script_finds_is_refused_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("rewards")
    module.__file__ = str(tmp_path / "rewards.py")
    exec("def score(): return 0.0", vars(module))
    monkeypatch.setitem(sys.modules, "rewards", module)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    with pytest.raises(ConfigError, match=r"do not find its module in .*: start the script in that folder, or put"):
        as_word("scoring.rule", module.score)
    monkeypatch.chdir(tmp_path)
    assert as_word("scoring.rule", module.score) == "scoring.rule='rewards.score'"
