"""Configurations that a stranger wrote: what they may read, and how much they may become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.compat.verl.configuration.references import MAX_CHARACTERS, References
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate
from asyncrl.errors import ConfigError

SECRET = "secret-of-this-machine"


def write(folder: Path, text: str, name: str = "theirs.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def of(folder: Path, text: str) -> Translated:
    return translate(read_verl(write(folder, text, "run.yaml"), [], {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:ASYNCRL_SECRET}",
        "x-${oc.env:ASYNCRL_SECRET}-y",
        "${ oc.env : ASYNCRL_SECRET }",
        "${oc.env:ASYNCRL_SECRET,default}",
        "${oc.decode:${oc.env:ASYNCRL_SECRET}}",
        "${oc.select:none,${oc.env:ASYNCRL_SECRET}}",
        "${oc.select:none,'${oc.env:ASYNCRL_SECRET}'}",
        "${oc.${data.word}:ASYNCRL_SECRET}",
        "${${data.word}}",
        r"\\${oc.env:ASYNCRL_SECRET}",
        "${oc.create:${oc.env:ASYNCRL_SECRET}}",
        "${hydra:runtime.cwd}",
        "${now:%Y}",
        "${data.hidden}",
        "${data.section.name}",
        "${oc.select:data.hidden}",
    ],
)
def test_no_resolver_is_called_and_none_is_passed_on(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_SECRET", SECRET)
    hidden = "${oc.env:ASYNCRL_SECRET}"
    content: dict[str, Any] = {
        "trainer": {"experiment_name": value, "project_name": "theirs"},
        "data": {"word": "env", "hidden": hidden, "section": hidden, "train_files": [value, "a.parquet"]},
    }
    file = write(tmp_path, yaml.safe_dump(content))
    text, report = translated(file, ["trainer.nnodes=1", "data.section.x=1"], None)
    everything = text + "".join(report)
    assert SECRET not in everything
    assert "${" not in text
    assert any("trainer.experiment_name" in line and "is left out" in line for line in report)
    assert str(Path.cwd()) not in everything


def test_references_of_a_file_with_users_are_left_out(tmp_path: Path) -> None:
    users = {"interaction": [{"class_name": "mine.User", "name": "u", "config": {"a": "${oc.env:HOME}"}}]}
    path = write(tmp_path, yaml.safe_dump(users), "users.yaml")
    turns = {"multi_turn": {"enable": True, "interaction_config_path": str(path)}}
    result = of(tmp_path, yaml.safe_dump({"actor_rollout_ref": {"rollout": turns}}))
    assert "actor.interactions" not in result.settings
    assert any("actor.interactions: its value has a reference" in line for line in result.differs)


def test_references_between_keys_hold() -> None:
    root = {
        "a": {"b": 3, "c": "${a.b}", "d": "n=${.b}, ${..e.f}", "g": "${.c}"},
        "e": {"f": "x", "list": ["${a.b}", "${e.f}"], "first": "${e.list.0}", "copy": "${a}"},
        "s": {"one": "${oc.select:a.b,7}", "two": "${oc.select:none,7}", "three": "${oc.select:none, 'x y'}"},
        "t": {"one": "${oc.select:none}", "two": "${oc.select:s.none,null}", "alias": "${e.copy.g}"},
        "missing": "???",
        "m": "${oc.select:missing,1}",
    }
    found = {name: References(root).resolved(root[name], name) for name in root}
    assert found["a"] == {"b": 3, "c": 3, "d": "n=3, x", "g": 3}
    assert found["e"]["list"] == [3, "x"]
    assert (found["e"]["first"], found["e"]["copy"]) == (3, found["a"])
    assert found["s"] == {"one": 3, "two": 7, "three": "x y"}
    assert found["t"] == {"one": None, "two": None, "alias": 3}
    assert found["m"] == 1


@pytest.mark.parametrize(
    "root",
    [{"a": "${a}"}, {"a": "${b}", "b": "x${a}"}, {"a": {"b": "${a}"}}, {"a": "${none}"}, {"a": "${b}", "b": "???"}],
)
def test_a_reference_to_itself_or_to_nothing_is_refused(root: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"refers to itself|has no value"):
        References(root).resolved(root["a"], "a")


def test_references_that_hold_each_other_many_times_take_neither_memory_nor_time(tmp_path: Path) -> None:
    texts = {f"t{number}": f"${{t{number - 1}}}" * 2 for number in range(1, 40)}
    sections = {f"s{number}": {"x": f"${{s{number - 1}}}", "y": f"${{s{number - 1}}}"} for number in range(1, 40)}
    root = {"t0": "x" * 100, **texts, "s0": {"x": 1}, **sections}
    references = References(root)
    with pytest.raises(ValueError, match=f"longer than {MAX_CHARACTERS} characters"):
        references.resolved(root["t39"], "t39")
    with pytest.raises(ValueError, match="values"):
        references.resolved(root["s39"], "s39")
    assert of(tmp_path, yaml.safe_dump(root)).unknown


def laughs(levels: int) -> str:
    first = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    return first + "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, levels))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        laughs(9),
        laughs(60),
        "a: &a {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1 or ''}, *a{n - 1 or ''}]}}\n" for n in range(1, 40)),
        "a: &a [*a]\n",
        "a: " + "[" * 100_000,
        "a: '" + "x" * 300_000 + "'",
        "a: &a " + "x" * 200_000 + "\nb: [" + "*a, " * 10_000 + "]",
    ],
    ids=["laughs", "more laughs", "merges", "itself", "deep", "long", "long texts"],
)
def test_a_file_that_becomes_more_than_it_says_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"theirs\.yaml: it cannot be read"):
        read_verl(write(tmp_path, text), [], {})
    turns = {"multi_turn": {"enable": True, "tool_config_path": str(tmp_path / "theirs.yaml")}}
    result = of(tmp_path, yaml.safe_dump({"actor_rollout_ref": {"rollout": turns}}))
    assert any("tool_config_path" in line and "cannot be read" in line for line in result.differs)


def test_a_device_is_no_file_of_tools(tmp_path: Path) -> None:
    turns = {"multi_turn": {"enable": True, "tool_config_path": "/dev/zero"}}
    result = of(tmp_path, yaml.safe_dump({"actor_rollout_ref": {"rollout": turns}}))
    assert any("tool_config_path" in line and "cannot be read" in line for line in result.differs)


def test_aliases_of_a_few_values_are_read(tmp_path: Path) -> None:
    text = "trainer: &same {nnodes: 2}\nactor_rollout_ref: {rollout: {n: 4}}\nother: *same\n"
    assert of(tmp_path, text).settings["learner.group_size"] == 4
