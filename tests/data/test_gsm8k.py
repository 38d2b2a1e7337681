"""GSM8K's published JSON lines as tasks, and its marked calculations as demonstrations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.arithmetic import calculate
from asyncrl.data.command import convert, convert_demonstrations
from asyncrl.data.converters.calculator_calls import LeftOut
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError
from asyncrl.tools.calculator import Calculator
from tests.scoring.fakes import rules_of

EXCERPT = Path(__file__).parent / "gsm8k"


def test_the_published_lines_become_tasks_with_the_number_as_ground_truth(tmp_path: Path) -> None:
    assert convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet") == (50, 0)
    tasks = TaskFile(tmp_path / "gsm8k.parquet")
    first = tasks[0]
    assert (first.id, first.ground_truth) == ("openai/gsm8k/train/0", "72")
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[1]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert len({task.id for task in tasks}) == 50
    assert all(task.ground_truth.lstrip("-").isdigit() for task in tasks)


def test_thousands_separators_and_unicode_line_separators_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "a\u2028b", "answer": "so\\n#### 1,250"}\n', "utf-8")
    assert convert("gsm8k", str(tmp_path), tmp_path / "out.parquet", "test") == (1, 0)
    (task,) = TaskFile(tmp_path / "out.parquet")
    assert (task.ground_truth, task.messages[1]["content"]) == ("1250", "a\u2028b")


@pytest.mark.parametrize("line", ["no json", "[]", '{"question": "?"}', '{"question": "?", "answer": "four"}'])
def test_a_line_that_is_none_of_theirs_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"question": "?", "answer": "#### 4"}}\n{line}\n')
    with pytest.raises(DataError, match="line 2"):
        convert("gsm8k", str(tmp_path), tmp_path / "out.parquet")


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.jsonl does not exist"):
        convert("gsm8k", str(tmp_path), tmp_path / "out.parquet", "test")


def test_a_split_that_gsm8k_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tset\.jsonl does not exist; the splits of GSM8K are train and test$"):
        convert("gsm8k", str(EXCERPT), tmp_path / "out.parquet", "tset")


@pytest.mark.parametrize(("name", "more"), [("train.jsonl", ""), ("test.jsonl", " --split test")])
def test_a_file_as_the_source_is_refused_with_its_folder(tmp_path: Path, name: str, more: str) -> None:
    file = tmp_path / name
    file.touch()
    with pytest.raises(DataError) as refused:
        convert("gsm8k", str(file), tmp_path / "out.parquet")
    assert str(refused.value) == f"{file} is a file; name its folder: --source {tmp_path}{more}"


def shown_from(folder: Path, *answers: str) -> tuple[Sequence[Sequence[Mapping[str, Any]]], Mapping[LeftOut, int]]:
    """The demonstrations of rows with these answers, and the counts of rows left out."""
    rows = (json.dumps({"question": "How many?", "answer": answer}) for answer in answers)
    (folder / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))
    count, left_out = convert_demonstrations("gsm8k", str(folder), folder / "shown.parquet")
    shown = [each.messages for each in DemonstrationFile([folder / "shown.parquet"])]
    assert len(shown) == count
    return shown, left_out


def expressions(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The expressions of the calls of the calculator in a conversation."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert {each["name"] for each in functions} == {Calculator.schema["name"]}
    return [json.loads(each["arguments"])["expression"] for each in functions]


def test_each_published_solution_becomes_a_demonstration_that_the_calculator_confirms_and_the_rules_accept(
    tmp_path: Path,
) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet")
    tasks = {task.messages[1]["content"]: task for task in TaskFile(tmp_path / "gsm8k.parquet")}
    count, left_out = convert_demonstrations("gsm8k", str(EXCERPT), tmp_path / "shown.parquet")
    assert count + sum(left_out.values()) == len(tasks) == 50
    assert count >= 45
    rules = [rules_of("gsm8k"), rules_of("exact_number")]
    for shown in DemonstrationFile([tmp_path / "shown.parquet"]):
        messages = shown.messages
        task = tasks[messages[1]["content"]]
        assert messages[:2] == task.messages
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert results == [calculate(each) for each in expressions(messages)]
        assert [rule(messages[-1]["content"], task.ground_truth).outcome for rule in rules] == [1.0, 1.0]
        assert not any("<<" in message["content"] for message in messages)


def test_a_calculation_is_called_where_the_solution_writes_its_result(tmp_path: Path) -> None:
    (messages,), left_out = shown_from(
        tmp_path, "She sold 48/2 = <<48/2=24>>24 clips.\nSo 2+3*4=$<<2+3*4=14.00>>14 (<<7=7>>7 each).\n#### 1,250"
    )
    assert left_out == {}
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert expressions(messages) == ["48/2", "3*4", "2+12"]
    assert [message["content"] for message in messages[2:]] == [
        *("She sold 48/2 =", "24", "24 clips.\nSo 2+3*4=$", "12", "", "14", "14 (7 each).\n#### 1250")
    ]


def test_solutions_without_a_calculation_or_with_a_wrong_one_are_left_out_and_counted(tmp_path: Path) -> None:
    good = "So <<2*2=4>>4.\n#### 4"
    wrong = (
        "<<2*2=5>>5\n#### 5",
        "<<1/3*6=2>>2\n#### 2",
        "<<4//2=2>>2\n#### 2",
        "<<2*2>>\n#### 4",
        "<<x=1=1>>\n#### 1",
        "<<2*2=4/0>>4\n#### 4",
        "<<2*2=4e999999999>>4\n#### 4",
    )
    shown, left_out = shown_from(tmp_path, good, "It is 4.\n#### 4", "<<4=4>>4\n#### 4", *wrong)
    assert [expressions(messages) for messages in shown] == [["2*2"]]
    assert left_out == {LeftOut.NO_CALCULATION: 2, LeftOut.NOT_CONFIRMED: len(wrong)}
    with pytest.raises(DataError, match="no row that can become a demonstration; 1 rows have no calculation"):
        shown_from(tmp_path, "It is 4.\n#### 4")


def test_the_policy_does_not_learn_to_write_broken_marks_of_a_calculation(tmp_path: Path) -> None:
    broken = ("<<5*3=15>15, <<2*2=4>>4.\n#### 4", "<<2*2=4>>4, 5*3=15>>15.\n#### 4")
    shown, left_out = shown_from(tmp_path, "<<1/2*1=1/2>>1/2\n#### 1/2", *broken)
    assert [expressions(messages) for messages in shown] == [["1/2", "0.5*1"]]
    assert left_out == {LeftOut.BROKEN: len(broken)}


def test_a_demonstration_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shown\.parquet: a demonstration has a text that is not valid Unicode"):
        shown_from(tmp_path, "\ud800 <<2*2=4>>4\n#### 4")
