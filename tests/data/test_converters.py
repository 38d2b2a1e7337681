"""Published data sets in their own formats become tasks that our rules score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data.command import convert, main
from asyncrl.data.converters.math_problems import last_box
from asyncrl.data.converters.rows import json_of, published_rows, text_of
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError
from tests.scoring.fakes import rules_of
from tests.scoring.rules.test_code import judge as judge_program
from tests.scoring.rules.test_tool_calls import judge as judge_calls

PRINTS = {"inputs": ["1"], "outputs": ["1"]}
NAMED_ROW = {"extra_info": {"index": "u-1"}}
ONE_CALL = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}


def converted(name: str, source: Path, expected: int, left_out: int = 0) -> TaskFile:
    out = source.parent / "out.parquet"
    assert convert(name, str(source), out) == (expected, left_out)
    return TaskFile(out)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_tasks_can_name_a_simulated_user_who_gets_the_ground_truth(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", {"question": "6*7?", "answer": "Well.\n#### 42"})
    out = tmp_path / "out.parquet"
    assert convert("gsm8k", str(tmp_path), out, user="checker") == (1, 0)
    tasks = TaskFile(out)
    assert tasks[0].extra_info["interaction_kwargs"] == {"name": "checker", "ground_truth": "42"}
    assert [task.id for task in tasks.by_user().values()] == [tasks[0].id]


def test_files_of_math_problems_are_scored_by_what_their_last_box_means(tmp_path: Path) -> None:
    folder = tmp_path / "MATH" / "train"
    halves = {
        "problem": "What is $1/4+1/4$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "Not $\\boxed{1}$: it is $\\frac{2}{4}=\\boxed{\\frac{1}{2}}$.",
    }
    other = {"problem": "What is $2+2$?", "level": "Level 1", "type": "Algebra", "solution": "So $\\boxed 4$."}
    for topic, number, problem in (("algebra", 10, other), ("algebra", 2, halves)):
        (folder / topic).mkdir(parents=True, exist_ok=True)
        (folder / topic / f"{number}.json").write_text(json.dumps(problem, indent=4))
    first, second = converted("math", folder, 2)
    assert first.id == "DigitalLearningGmbH/MATH-lighteval/train/0"
    assert (first.ground_truth, second.ground_truth) == ("\\frac{1}{2}", "4")
    assert first.extra_info == {"index": 0, "split": "train", "level": "Level 1", "type": "Prealgebra"}
    math = rules_of("math")
    assert [math(text, first.ground_truth).outcome for text in ("\\boxed{0.5}", "\\boxed{2}")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{a}", "a"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\text{x {y}}}.", "\\text{x {y}}"),
        ("\\fbox{3}", "3"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed\\frac{1}{2}$", "\\frac{1}{2}"),
        ("$\\boxed\\frac12$", "\\frac12"),
        ("$\\boxed \\pi$", "\\pi"),
        ("none", ""),
    ],
)
def test_the_last_closed_box_is_the_answer(solution: str, answer: str) -> None:
    assert last_box(solution) == answer


def test_dapo_keeps_its_prompts_and_each_problem_once(tmp_path: Path) -> None:
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nHow much is 30 and 4?\n\nRemember to "
        'put your answer on its own line after "Answer:".'
    )
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    other = {**row, "prompt": [{"content": "Other?", "role": "user"}], "extra_info": {"index": "b"}}
    pq.write_table(pa.Table.from_pylist([row, row, other, row]), tmp_path / "dapo.parquet")
    first, _ = converted("dapo", tmp_path / "dapo.parquet", 2, left_out=2)
    assert first.id == "math_dapo/train/9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    assert first.messages == [{"content": content, "role": "user"}]
    for rule in ("exact_number", "math"):
        score = rules_of(rule)
        assert score("30 and 4 are 34.\nAnswer: 34", first.ground_truth).outcome == 1.0
        assert score("30 and 4 are 34.\nAnswer: 35", first.ground_truth).outcome == 0.0


def test_questions_with_golden_answers_are_scored_by_words(tmp_path: Path) -> None:
    rows = [
        {"id": "dev_0", "question": "Who wrote it?", "golden_answers": ["Jane Austen", "Austen"], "metadata": {}},
        {"_id": "5a", "question": "Are both towns?", "answer": "yes", "supporting_facts": [["A", 0]], "type": "bridge"},
    ]
    first, second = converted("search", lines(tmp_path / "hotpotqa.jsonl", *rows), 2)
    assert (first.data_source, first.ground_truth, second.ground_truth) == (
        *("searchqa", '["Jane Austen", "Austen"]', '["yes"]'),
    )
    f1 = rules_of("f1")
    assert f1("It is <answer>austen</answer>", first.ground_truth).outcome == 1.0
    assert f1("<answer>no</answer>", second.ground_truth).outcome == 0.0


@pytest.mark.slow
def test_programs_are_scored_by_their_tests_and_rows_without_any_are_left_out(tmp_path: Path) -> None:
    reads = {
        "problem_id": 0,
        "question": "Add the numbers.",
        "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}),
        "difficulty": "introductory",
        "starter_code": "",
    }
    called = {
        **reads,
        "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}),
        "starter_code": "def add(a, b):",
    }
    method = {**called, "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n"}
    rows = (reads, called, method, {**reads, "input_output": ""})
    first, second, third = converted("code", lines(tmp_path / "apps.jsonl", *rows), 3, left_out=1)
    adds = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
    assert judge_program(adds, first.ground_truth)["score"] == 1.0
    assert judge_program("print(3)", first.ground_truth)["score"] == 0.0
    assert judge_program("def add(a, b): return a + b", second.ground_truth)["score"] == 1.0
    assert judge_program("def add(a, b): return 3", second.ground_truth)["score"] == 0.0
    solution = "class Solution:\n    def add(self, a, b): return a {} b"
    assert judge_program(solution.format("+"), third.ground_truth)["score"] == 1.0
    assert judge_program(solution.format("-"), third.ground_truth)["score"] == 0.0
    assert "Begin with:\nclass Solution:" in third.messages[0]["content"]


def test_tool_calls_are_scored_by_the_published_answers(tmp_path: Path) -> None:
    tool = {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "town": {"description": "its name", "type": "str"},
            "days": {"description": "how many", "type": "int, optional", "default": 1},
            "units": {"description": "which", "type": "List[str], optional"},
        },
    }
    calls = [{"name": "weather", "arguments": {"town": "Ulm"}}]
    row = {"id": 0, "query": "Weather in Ulm?", "answers": json.dumps(calls), "tools": json.dumps([tool])}
    schema = {"type": "function", "function": {"name": "plain", "parameters": {"type": "object", "properties": {}}}}
    first, second = converted(
        "tools", lines(tmp_path / "xlam.json", row, {"query": "?", "answers": [], "tools": [schema]}), 2
    )
    assert first.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "town": {"type": "string", "description": "its name"},
            "days": {"type": "integer", "description": "how many", "default": 1},
            "units": {"type": "array", "description": "which"},
        },
        "required": ["town"],
    }
    assert second.tools == (schema,)
    assert judge_calls(json.loads(first.ground_truth), calls)["score"] == 1.0
    assert judge_calls(json.loads(first.ground_truth), [{"name": "weather", "arguments": {}}])["score"] == 0.0


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("math", {"problem": "?", "solution": "4"}, "line 1 has no problem, or no solution"),
        ("dapo", {"prompt": "?"}, "line 1 has no messages in prompt"),
        ("search", {"question": "?", "golden_answers": [" "]}, "line 1 has no question, or neither"),
        ("code", {"question": "?", "input_output": "{"}, "line 1 has no question, or no input_output"),
        ("code", {"question": "?", "input_output": ""}, "has no row that can become a task"),
        ("tools", {"query": "?", "tools": "3", "answers": "[]"}, "line 1 does not have query, tools and answers"),
        ("math", {"problem": "?", "answer": ["1", "2"]}, "line 1 has no problem, or no solution"),
        ("dapo", {"prompt": ["?"], "reward_model": {"ground_truth": "1"}}, "line 1 has no messages in prompt"),
        ("dapo", {"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}}, "has no messages in prompt"),
        (
            "dapo",
            {"prompt": [{"role": "user", "content": "?"}], "reward_model": "1"},
            "or no reward_model.ground_truth",
        ),
        ("search", {"question": {"text": "?"}, "answer": "a"}, "line 1 has no question, or neither"),
        ("search", {"question": "?", "answer": [["a"], None]}, "line 1 has no question, or neither"),
        ("code", {"question": None, "input_output": PRINTS}, "the question is not a text"),
        ("code", {"question": "?", "input_output": {"inputs": "12", "outputs": "12"}}, "outputs must be lists"),
        ("code", {"question": "?", "input_output": {**ONE_CALL, "inputs": ["ab"]}}, "must be a list of arguments"),
        ("code", {"question": "?", "input_output": {**ONE_CALL, "fn_name": "f(1);g"}}, "which is not a name"),
        ("code", {"question": "?", "input_output": '{"fn_name": "f", "inputs": [[NaN]], "outputs": [1]}'}, "NaN is no"),
        ("code", {"question": "?", "input_output": "[" * 100_000}, "no input_output with inputs and outputs"),
        ("tools", {"query": None, "tools": [], "answers": []}, "the query is not text"),
        ("tools", {"query": "?", "tools": [{"name": 3}], "answers": []}, "a name must be text, not 3"),
        ("tools", {"query": "?", "tools": '[{"name": "f", "parameters": {"a": NaN}}]', "answers": []}, "NaN is no"),
        ("tools", {"query": "?", "tools": '[{"name": "\\ud800"}]', "answers": []}, "surrogates not allowed"),
        ("tools", {"query": "?", "tools": [], "answers": [{"name": "f", "arguments": "[1]"}]}, "line 1 does not have"),
    ],
)
def test_a_row_of_another_format_is_named(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(name, str(lines(tmp_path / "x.jsonl", row)), tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("name", "rows", "truths"),
    [
        (
            "math",
            [{"problem": "?", "answer": 0, "level": 1}, {"problem": "?", "answer": "1", "level": "2"}],
            ["0", "1"],
        ),
        (
            "search",
            [{"question": "?", "answer": {"value": "Paris", "aliases": ["paris", "Paris"]}}],
            ['["Paris", "paris"]'],
        ),
        ("search", [{"question": "?", "golden_answers": ["a", "", None]}], ['["a"]']),
        ("search", [{"question": "?", "answer": 0}], ['["0"]']),
        (
            "tools",
            [{"query": "?", "tools": [], "answers": [{"name": "f", "arguments": '{"a": 1}'}]}],
            ['[{"name": "f", "arguments": {"a": 1}}]'],
        ),
        (
            "dapo",
            [
                {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": 0}},
                {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "1"}, **NAMED_ROW},
            ],
            ["0", "1"],
        ),
    ],
)
def test_answers_of_other_types_and_fields_of_several_are_taken_over(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], truths: list[str]
) -> None:
    assert [task.ground_truth for task in converted(name, lines(tmp_path / "x.jsonl", *rows), len(rows))] == truths


def test_files_may_begin_with_the_mark_that_windows_writes(tmp_path: Path) -> None:
    row = b'\xef\xbb\xbf{"question": "?", "answer": "a #### 1"}\n'
    (tmp_path / "train.jsonl").write_bytes(row)
    assert convert("search", str(tmp_path / "train.jsonl"), tmp_path / "out.parquet") == (1, 0)
    assert convert("gsm8k", str(tmp_path), tmp_path / "out.parquet") == (1, 0)


@pytest.mark.parametrize("content", [b"\xff\n", b'{"question": null, "answer": "#### 1"}\n'])
def test_a_file_of_gsm8k_that_is_no_text_or_has_no_question_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.jsonl"):
        convert("gsm8k", str(tmp_path), tmp_path / "out.parquet")


def test_a_folder_as_output_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = lines(tmp_path / "x.jsonl", {"question": "?", "answer": "42"})
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="out is a folder; name a file"):
        convert("search", str(source), tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "x.jsonl"]


def test_the_command_tells_how_many_tasks_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = lines(tmp_path / "nq.jsonl", {"question": "?", "answer": "42"}), tmp_path / "nq.parquet"
    words = ["search", "--source", str(source), "--out", str(out), "--split", "dev", "--data-source", "nq"]
    main(words)
    assert capsys.readouterr().out == f"wrote 1 tasks to {out}\n"
    assert TaskFile(out)[0].id == "nq/dev/0"
    source.write_text("none\n")
    with pytest.raises(DataError, match="line 1 is not a JSON object"):
        main(words)


@pytest.mark.parametrize(("name", "hint"), [("gsm", "did you mean gsm8k?"), ("zzz", "use one of gsm8k, math, ")])
def test_an_unknown_set_is_refused_with_the_nearest_one_or_with_all(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, "--source", "x", "--out", "y"])
    assert f"asyncrl data: error: unknown set {name!r}; {hint}" in capsys.readouterr().err


def test_the_command_writes_tasks_and_demonstrations_or_one_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "6*7?", "answer": f"It is <<6*7={result}>>{result}.\n#### 42"} for result in ("42", "43")]
    lines(tmp_path / "train.jsonl", *rows)
    out, shown = tmp_path / "out.parquet", tmp_path / "shown.parquet"
    main(["gsm8k", "--source", str(tmp_path), "--demonstrations", str(shown)])
    assert not out.exists()
    assert DemonstrationFile([shown])[0].messages[-1] == {"role": "assistant", "content": "42.\n#### 42"}
    capsys.readouterr()
    main(["gsm8k", "--source", str(tmp_path), "--out", str(out), "--demonstrations", str(shown)])
    assert capsys.readouterr().out == (
        f"wrote 1 demonstrations to {shown}; left out 1 rows that have a calculation that the calculator does not "
        f"confirm\nwrote 2 tasks to {out}\n"
    )
    assert len(TaskFile(out)) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("math --out a --demonstrations b", "the set math has no solutions from which demonstrations can be made"),
        ("gsm8k --out a --demonstrations a", "--demonstrations and --out are the same file, a; name two files"),
        ("gsm8k --out a --demonstrations ../{here}/a", "--demonstrations and --out are the same file"),
        ("gsm8k --out x/train.jsonl", "x/train.jsonl is written as Parquet; give it a name that ends in .parquet"),
        ("gsm8k --demonstrations shown.json", "shown.json is written as Parquet"),
        ("gsm8k --out a --demonstrations b --user checker", "--user continues after it; leave out one of them"),
        ("gsm8k", "name the Parquet file to write: --out tasks.parquet"),
        ("reasoning-gym --out a --split test", "--split: the set reasoning-gym has no splits; choose other tasks by"),
        ("gym --out a --split train", "--split: the set gym has no splits; choose other tasks by the number of"),
    ],
)
def test_options_without_effect_and_files_that_cannot_be_written_are_refused_before_anything_is_read(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words.format(here=Path.cwd().name).split(), "--source", "x"])
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("content", ['[\n {"a": 1},\n 5\n]', '[\n {"x": NaN}\n]'])
def test_a_list_of_which_a_row_is_wrong_is_refused_with_its_own_fault(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=r"rows\.json is not a list of JSON objects: "):
        convert("search", str(tmp_path / "rows.json"), tmp_path / "out.parquet")


def test_folders_within_a_folder_may_be_named_like_files_and_those_of_save_to_disk_are_refused(tmp_path: Path) -> None:
    part = tmp_path / "rows" / "train.parquet"
    part.mkdir(parents=True)
    pq.write_table(pa.table({"question": ["6*7?"], "answer": ["#### 42"]}), part / "part-0.parquet")
    assert [row for _, row in published_rows(str(tmp_path / "rows"))] == [{"question": "6*7?", "answer": "#### 42"}]
    (tmp_path / "rows" / "state.json").write_text("{}")
    (tmp_path / "rows" / "data-00000-of-00001.arrow").touch()
    with pytest.raises(DataError, match="was written by save_to_disk"):
        next(published_rows(str(tmp_path / "rows")))


@pytest.mark.parametrize("value", [True, float("nan"), None, [1]])
def test_what_is_neither_a_text_nor_a_number_has_no_text(value: object) -> None:
    assert text_of(value) == ""
    assert (text_of(" a "), text_of(7), text_of(0.5)) == ("a", "7", "0.5")


def test_a_number_that_no_float_holds_is_no_json() -> None:
    with pytest.raises(ValueError, match="1e999 is too large"):
        json_of('{"x": 1e999}')
