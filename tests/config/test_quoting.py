"""Values of Python become words of the command line; functions and classes become their names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

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


@pytest.mark.parametrize(
    "name", ["a:b", "a, b", " a", "[a]", "{a}", "a=(b)", "C:\\", "a\\:b", "org/data-set.v2", "${a}", 3, "on"]
)
def test_the_names_of_mappings_are_read_back_as_they_are(name: str | int) -> None:
    word = as_word("actor.template_kwargs", {name: {name: 2.0}})
    assert OverridesParser.create().parse_override(word).value() == {name: {name: 2.0}}


def test_the_name_of_a_data_source_with_a_colon_reaches_the_configuration() -> None:
    words = [as_word("scoring.rules", {"org:gsm": "gsm8k"}), "model.path=m", "data.train=README.md"]
    assert read(words).scoring.rules == {"org:gsm": "gsm8k"}


@pytest.mark.parametrize("name", ["a#b", "\xe9", "123", "true", "null", "", "it's", "a\nb"])
def test_a_name_that_a_word_cannot_have_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^actor\.template_kwargs: .* cannot be written .* give it in a file"):
        as_word("actor.template_kwargs", {"outer": {name: 2.0}})


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
