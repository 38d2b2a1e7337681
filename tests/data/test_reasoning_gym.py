"""Tasks of reasoning-gym: as a source, as a task file, and scored by their own data sets."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import ScoringConfig
from asyncrl.data.command import convert, convert_demonstrations
from asyncrl.data.converters.reasoning_gym import CALCULATED, check_held_out, packed, tasks, unpacked
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.layout import AS_THEY_ARE
from asyncrl.data.made_rows import read_made, write_rows
from asyncrl.data.reading import TaskFile
from asyncrl.data.row_tasks import REQUIRED, RowReader
from asyncrl.data.sources import parts
from asyncrl.errors import ConfigError, DataError, ScoringError
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.types import Task
from tests.data.fake_reasoning_gym import fake_modules
from tests.helpers import make_task
from tests.scoring.fakes import rule_input

RULE = "asyncrl.scoring.rules.reasoning_gym"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(RULE, None)
    yield
    sys.modules.pop(RULE, None)


def outcome(task: Task, answer: str) -> float:
    given = rule_input(answer)
    rules = load_rules(ScoringConfig(rule="reasoning_gym"))
    return rules.score(RuleInput(task, given.trajectory, given.answer, given.response)).outcome


def made(folder: Path, source: str) -> TaskFile:
    write_rows(folder / "made.arrow", parts(source, REQUIRED), RowReader(AS_THEY_ARE))
    return TaskFile(folder / "made.arrow", rows=read_made(folder / "made.arrow"))


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_source_makes_the_same_tasks_each_time_and_their_data_set_scores_them(tmp_path: Path):
    source = "reasoning-gym:sums?size=5&most=30"
    found = list(made(tmp_path, source))
    assert found == list(tasks(source)) == list(tasks(f"{source}&seed=0"))
    assert found != list(tasks(f"{source}&seed=1"))
    assert [task.id for task in found] == [f"reasoning-gym/sums/seed-0/{index}" for index in range(5)]
    for task in found:
        right = task.ground_truth
        assert outcome(task, right) == outcome(task, f"I say <answer> {right} </answer>, surely.") == 1.0
        assert outcome(task, "29" if right != "29" else "28") == 0.5
        assert outcome(task, "seven") == outcome(task, "") == outcome(task, "99") == 0.0


@pytest.mark.usefixtures("fake")
def test_a_task_file_has_the_tasks_of_the_source(tmp_path: Path):
    written = convert("reasoning-gym", "sums?size=4&seed=3", tmp_path / "tasks.parquet", say=lambda line: None)
    assert written == (4, 0)
    assert list(TaskFile(tmp_path / "tasks.parquet")) == list(made(tmp_path, "reasoning-gym:sums?size=4&seed=3"))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("reasoning-gym:chess?size=5", "reasoning-gym has no chess; it has composite, sums"),
        ("reasoning-gym:composite", "name each of its data sets as a separate source"),
        ("reasoning-gym:sums?size=0", "refuses the options: AssertionError: size must be positive"),
        ("reasoning-gym:sums?width=5", "refuses the options: TypeError"),
        ("reasoning-gym:?size=5", "write reasoning-gym:NAME"),
        ("reasoning-gym:sums?size", "write reasoning-gym:NAME"),
    ],
)
def test_a_source_that_cannot_be_made_is_refused_by_name(source: str, reason: str):
    with pytest.raises(DataError, match=reason):
        list(tasks(source))


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    for name in fake_modules():
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, RULE, raising=False)
    with pytest.raises(DataError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        list(tasks("reasoning-gym:sums"))
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        load_rules(ScoringConfig(rule="reasoning_gym"))


@pytest.mark.parametrize(
    ("package", "source"), [("reasoning_gym", "reasoning-gym:sums"), ("datasets", "hub:o/n?split=train")]
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(
    package: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / f"{package}.py").write_text("from json import no_such_name")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"pip install 'asyncrl\[.*\]' \(cannot import name 'no_such_name'"):
        list(parts(source, REQUIRED))


@pytest.mark.usefixtures("fake")
def test_a_task_of_another_source_is_a_failure_and_no_zero():
    with pytest.raises(ScoringError, match=r"has no extra_info\.reasoning_gym"):
        outcome(make_task(), "7")
    with pytest.raises(ScoringError, match="cannot be used"):
        outcome(make_task(extra_info={"reasoning_gym": "{"}), "7")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(PLAIN)
def test_a_packed_value_comes_back_as_it_was(value: Any):
    assert unpacked(packed(value)) == value


@pytest.mark.slow
def test_real_reasoning_gym_scores_its_own_answers_after_packing():
    gym = pytest.importorskip("reasoning_gym", reason="needs asyncrl[reasoning-gym]")
    for name in ("chain_sum", "arc_agi", "sudoku", "graph_color"):
        for task, entry in zip(
            tasks(f"reasoning-gym:{name}?size=2"), gym.create_dataset(name, size=2, seed=0), strict=True
        ):
            kept = unpacked(task.extra_info["reasoning_gym"])["entry"]
            assert kept == entry
            if entry["answer"] is not None:
                assert outcome(task, f"<answer>{entry['answer']}</answer>") == 1.0


def test_a_data_set_without_an_expression_has_no_demonstrations(tmp_path: Path):
    with pytest.raises(DataError, match="only these data sets have demonstrations: basic_arithmetic, chain_sum"):
        convert_demonstrations("reasoning-gym", "sudoku?size=2", tmp_path / "shown.parquet")


@pytest.mark.slow
def test_real_reasoning_gym_accepts_the_answers_of_demonstrations(tmp_path: Path):
    pytest.importorskip("reasoning_gym", reason="needs asyncrl[reasoning-gym]")
    for name in CALCULATED:
        source = f"{name}?size=6"
        count, left_out = convert_demonstrations("reasoning-gym", source, tmp_path / "shown.parquet")
        assert count + sum(left_out.values()) == 6
        assert count >= 4
        shown = [each.messages for each in DemonstrationFile([tmp_path / "shown.parquet"])]
        assert all([message["role"] for message in each[:3]] == ["user", "assistant", "tool"] for each in shown)
        solved = {task.messages[0]["content"]: task for task in tasks(f"reasoning-gym:{source}")}
        assert outcome(solved[shown[0][0]["content"]], shown[0][-1]["content"]) == 1.0


@pytest.mark.parametrize(
    ("held_out", "seed"),
    [
        ("sums?size=10&seed=1", 100),
        ("sums?seed=99", 100),
        ("sums?seed=-4&size=5", 100),
        ("sums?size=10&most=3", 100),
        ("chess?seed=1499", 1500),
    ],
)
def test_held_out_tasks_that_are_training_tasks_are_refused_with_a_seed_that_works(held_out: str, seed: int):
    train = ["reasoning-gym:sums?size=100&most=5", "reasoning-gym:chess?seed=1000", "tasks.parquet"]
    with pytest.raises(DataError, match=rf"{re.escape(held_out)} would make training tasks .* write seed={seed} or"):
        check_held_out(train, ["test.parquet", f"reasoning-gym:{held_out}"])
    name = held_out.partition("?")[0]
    check_held_out(train, [f"reasoning-gym:{name}?seed={seed}", "reasoning-gym:go", "tasks.parquet", train[0]])


@pytest.mark.slow
def test_a_seed_beyond_the_training_tasks_makes_other_tasks():
    pytest.importorskip("reasoning_gym", reason="needs asyncrl[reasoning-gym]")
    asked = [
        {task.messages[0]["content"] for task in tasks(f"reasoning-gym:basic_arithmetic?size=20&min_terms=4{seed}")}
        for seed in ("", "&seed=1", "&seed=20")
    ]
    assert len(asked[0] & asked[1]) == 19
    assert not asked[0] & asked[2]
