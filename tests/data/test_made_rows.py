"""Rows that a start writes into the run's folder are the rows of their sources, and stay on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data import sources, tables
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.made_rows import read_made, write_rows
from asyncrl.data.reading import TaskFile
from asyncrl.data.row_tasks import OPTIONAL, REQUIRED, RowReader
from asyncrl.errors import DataError
from tests.data.test_tables import datasets_folder, lines, parquet, row

QUESTIONS = RowLayout({"prompt": "question", "ground_truth": "answer.value", "hardness": "level"}, "Be brief.")


TOOLS = '[{"name": "f", "parameters": {}}]'


def question(number: int, **more: Any) -> dict[str, Any]:
    return {"question": f"{number}+1?", "answer": {"value": str(number + 1)}, "level": number % 3, **more}


def write(path: Path, names: list[str], layout: RowLayout = AS_THEY_ARE) -> None:
    given = (part for name in names for part in sources.parts(name, REQUIRED, OPTIONAL, layout))
    write_rows(path, given, RowReader(layout))


def made(path: Path, names: list[str], layout: RowLayout = AS_THEY_ARE) -> TaskFile:
    write(path, names, layout)
    return TaskFile(path, None, RowLayout({}, layout.system_prompt), read_made(path))


def test_made_rows_are_the_tasks_of_their_files_in_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (sources, tables):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    names = [
        str(parquet(tmp_path / "a.parquet", *(row(n, environment="chess") for n in range(5)))),
        str(lines(tmp_path / "b.jsonl", *(row(n, extra_info={"note": {"deep": [n]}}) for n in range(5, 8)))),
        str(datasets_folder(tmp_path / "c", [row(8, tools=TOOLS)], [row(9, tools=TOOLS)])),
    ]
    files, stored = TaskFile(names), made(tmp_path / "made.arrow", names)
    assert list(stored) == list(files)
    assert [stored.place(index) for index in range(10)] == [files.place(index) for index in range(10)]
    assert stored.by_environment().keys() == files.by_environment().keys() == {0, 5}
    kept = np.arange(10) % 2 == 1
    assert list(stored.left(kept)) == list(files.left(kept)) == [files[n] for n in range(1, 10, 2)]
    assert stored.left(kept).by_roles() == {0: files[1]}
    assert stored.left(kept).left(np.arange(5) == 4)[0] == files[9]


def test_a_file_that_is_listed_twice_keeps_its_row_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (sources, tables):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    names = [str(lines(tmp_path / "a.jsonl", *(row(number) for number in range(3))))] * 2
    stored = made(tmp_path / "made.arrow", names)
    assert [stored.place(index) for index in range(6)] == [f"{names[0]}: line {number}" for number in (1, 2, 3)] * 2


@pytest.mark.parametrize("kind", ["a.parquet", "a.jsonl", "datasets"])
def test_columns_that_the_configuration_names_become_the_fields_of_tasks(tmp_path: Path, kind: str):
    rows = [question(number) for number in range(3)]
    write = {"a.parquet": parquet, "a.jsonl": lines}.get(kind, lambda path, *given: datasets_folder(path, given))
    path = write(tmp_path / kind, *rows)
    for tasks in (TaskFile(path, layout=QUESTIONS), made(tmp_path / "made.arrow", [str(path)], QUESTIONS)):
        assert [task.ground_truth for task in tasks] == ["1", "2", "3"]
        assert [task.extra_info["hardness"] for task in tasks] == [0, 1, 2]
        assert {task.data_source for task in tasks} == {path.stem}
        assert tasks[2].messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+1?"},
        ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_the_ids_of_tasks_have_a_text_index_of_every_type_in_memory_and_on_the_disk(tmp_path: Path, kind: pa.DataType):
    path, layout = tmp_path / "a.parquet", RowLayout({"prompt": "q", "ground_truth": "a", "index": "uid"})
    uid = pa.array(["a7", "b9"]).cast(kind)
    pq.write_table(pa.table({"q": ["1+1?", "2+2?"], "a": ["2", "4"], "uid": uid}), path)
    for tasks in (TaskFile(path, layout=layout), made(tmp_path / "made.arrow", [str(path)], layout)):
        assert [task.id for task in tasks] == ["a/a/a7", "a/a/b9"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path):
    path = parquet(tmp_path / "a.parquet", question(1))
    with pytest.raises(
        DataError, match=r"a.parquet has no column problem, which data.columns gives for prompt; it has a"
    ):
        TaskFile(path, layout=RowLayout({"prompt": "problem", "ground_truth": "answer.value"}))
    with pytest.raises(DataError, match=r"has no column answer\.text"):
        TaskFile(path, layout=RowLayout({"prompt": "question", "ground_truth": "answer.text"}))
    plain = parquet(tmp_path / "b.parquet", {"question": "1+1?", "result": "2"})
    with pytest.raises(DataError, match="has no column reward_model; it has question, result"):
        TaskFile(plain, layout=RowLayout({"prompt": "question"}))


@pytest.mark.parametrize("kind", ["a.parquet", "a.jsonl", "a.json"])
def test_a_named_column_may_be_null_in_every_row_unless_every_task_needs_it(tmp_path: Path, kind: str):
    rows = [{**question(number), "level": None, "of": {"level": None}} for number in range(3)]
    path = tmp_path / kind
    if kind == "a.json":
        path.write_text(json.dumps(rows))
    else:
        {"a.parquet": parquet, "a.jsonl": lines}[kind](path, *rows)
    layout = RowLayout({**QUESTIONS.columns, "inner": "of.level"})
    for tasks in (TaskFile(path, layout=layout), made(tmp_path / "made.arrow", [str(path)], layout)):
        assert [(task.extra_info["hardness"], task.extra_info["inner"]) for task in tasks] == [(None, None)] * 3
    with pytest.raises(DataError, match=r"has no value in column level; mend or drop the row"):
        TaskFile(path, layout=RowLayout({"prompt": "question", "ground_truth": "level"}))


def test_a_system_message_of_the_task_stays_alone(tmp_path: Path):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    path = parquet(tmp_path / "a.parquet", row(0, prompt=messages))
    assert TaskFile(path, layout=RowLayout({}, "ours"))[0].messages == messages


def test_rows_that_are_no_tasks_are_refused_with_their_places_and_leave_no_file(tmp_path: Path):
    good = str(parquet(tmp_path / "a.parquet", row(0)))
    bad = str(parquet(tmp_path / "b.parquet", row(1, prompt=5)))
    with pytest.raises(DataError, match=r"b\.parquet: row 0 .*column prompt must be a list of messages"):
        write(tmp_path / "made.arrow", [good, bad])
    lacking = str(lines(tmp_path / "c.jsonl", row(0), {**row(1), "reward_model": {"ground_truth": None}}))
    with pytest.raises(DataError, match=r"c\.jsonl: line 2, column reward_model\.ground_truth is null"):
        write(tmp_path / "made.arrow", [lacking])
    with pytest.raises(DataError, match=r"d\.jsonl has no column reward_model; it has data_source, prompt"):
        write(tmp_path / "made.arrow", [str(lines(tmp_path / "d.jsonl", {"prompt": [], "data_source": "s"}))])
    assert not list(tmp_path.glob("*.arrow*"))


READER = """
import sys
from pathlib import Path
from asyncrl.data.made_rows import read_made
from asyncrl.data.reading import TaskFile

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

path = Path(sys.argv[1])
before = anonymous()
tasks = TaskFile(path, rows=read_made(path))
tasks[len(tasks) - 1], tasks[0], tasks.by_roles(), tasks.by_source()
print(len(tasks), anonymous() - before)
"""


@pytest.mark.slow
def test_rows_that_a_start_made_take_a_small_part_of_their_size_in_memory(tmp_path: Path):
    texts = pa.array(["x" * 20_000] * 5000)
    messages = pa.StructArray.from_arrays([pa.repeat("user", 5000), texts], ["role", "content"])
    prompts = pa.ListArray.from_arrays(pa.array(range(5001), pa.int32()), messages)
    truths = pa.StructArray.from_arrays([pa.repeat("1", 5000)], ["ground_truth"])
    table = pa.table({"prompt": prompts, "data_source": pa.repeat("s", 5000), "reward_model": truths})
    pq.write_table(table, tmp_path / "a.parquet")
    path = tmp_path / "made.arrow"
    write(path, [str(tmp_path / "a.parquet")])
    assert path.stat().st_size > 100_000_000
    read = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True)
    rows, kilobytes = map(int, read.stdout.split())
    assert rows == 5000
    assert kilobytes < 40_000, "pandas, which pyarrow loads where it is installed, takes 26 MB of this"


def test_sources_of_another_form_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    for source, reason in (
        ("hub:a/b", "names no split; write hub:OWNER/NAME"),
        ("hub:?split=train", "write hub:OWNER/NAME"),
        ("hub:a/b?split=train&split=test", "each key once"),
        ("hub:a/b?split=train&rows=5", "unknown key rows; write"),
        ("hub:json?split=train", "json is not OWNER/NAME; write hub:OWNER/NAME"),
        ("hub:../b?split=train", "../b is not OWNER/NAME"),
        ("hub:/tmp/../etc?split=train", "/tmp/../etc is not OWNER/NAME"),
        ("hub:asyncrl/data?split=train", "the local folder asyncrl/data would be read; if you mean it, name it /"),
        ("hf://datasets/a/b/../../c", "is outside of the data set"),
    ):
        with pytest.raises(DataError, match=reason.replace("?", r"\?")):
            list(sources.parts(source, REQUIRED))


class FakeSplit:
    """A stand-in for a split of `datasets`, with the methods that are used."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.column_names = table.column_names
        self.features = SimpleNamespace(arrow_schema=table.schema)

    def select_columns(self, names: list[str]) -> FakeSplit:
        return FakeSplit(self.table.select(names))

    def with_format(self, kind: str) -> FakeSplit:
        assert kind == "arrow"
        return self

    def iter(self, rows: int) -> Any:
        return (pa.Table.from_batches([batch]) for batch in self.table.to_batches(rows))


class FakeDatasets:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._table = pa.Table.from_pylist(rows)

    def load_dataset(self, name: str, config: str | None, split: str, revision: str | None) -> FakeSplit:
        self.calls.append((name, config, split, revision))
        if name == "no/where":
            raise FileNotFoundError("not on the hub")
        return FakeSplit(self._table)


def test_a_split_of_the_hub_is_read_by_datasets_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeDatasets([question(number, unused=1) for number in range(3)])
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    tasks = made(tmp_path / "made.arrow", ["hub:o/n?config=main&split=train&revision=abc"], QUESTIONS)
    assert set(fake.calls) == {("o/n", "main", "train", "abc")}
    assert [task.id for task in tasks] == [f"o/n/train/{number}" for number in range(3)]
    assert tasks.place(1) == "o/n/train: row 1"
    with pytest.raises(
        DataError,
        match=r"hub:no/where\?split=train cannot be loaded: FileNotFoundError: not on the hub .*; check its name",
    ):
        list(sources.parts("hub:no/where?split=train", REQUIRED))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'asyncrl\[datasets\]'"):
        list(sources.parts("hub:o/n?split=train", REQUIRED))


@pytest.mark.slow
def test_real_datasets_give_the_rows_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets", reason="needs asyncrl[datasets]")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "train.jsonl").write_text("".join(json.dumps(question(n)) + "\n" for n in range(3)))
    tasks = made(tmp_path / "made.arrow", [f"hub:{tmp_path}/questions?split=train"], QUESTIONS)
    assert [task.ground_truth for task in tasks] == ["1", "2", "3"]


def test_rows_that_arrow_or_the_wire_cannot_hold_are_refused_with_the_file(tmp_path: Path):
    deep = lines(tmp_path / "deep.jsonl", row(0, extra_info=json.loads('{"x": ' * 600 + "1" + "}" * 600)))
    with pytest.raises(DataError, match=r"deep.jsonl: line 1 cannot be sent: it is nested more than 64 deep"):
        TaskFile(deep)
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["q"])] * 2, names=["prompt", "prompt"]), twice)
    with pytest.raises(DataError, match=r"twice.parquet has more than one column prompt"):
        TaskFile(twice)
    for path, reason in ((deep, "nested more than 64 deep"), (twice, "more than one column prompt")):
        with pytest.raises(DataError, match=reason):
            made(tmp_path / "made.arrow", [str(path)])
    assert sorted(tmp_path.iterdir()) == [deep, twice]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "made"])
def test_whole_rows_keep_all_columns_and_other_rows_none(tmp_path: Path, kind: str) -> None:
    named = {"agent_name": "twice", "board": {"size": 3}, "reward_model": {"style": "model", "ground_truth": "1"}}
    rows = [row(0, ability="art", **named), row(1, agent_name=None, ability="math")]
    whole = RowLayout(whole_rows=True)
    path = tmp_path / ("rows.jsonl" if kind == "jsonl" else "rows.parquet")
    (lines if kind == "jsonl" else parquet)(path, *rows)
    if kind == "made":
        write(tmp_path / "made", [str(path)], whole)
        tasks = TaskFile(path, None, whole, read_made(tmp_path / "made"))
    else:
        tasks = TaskFile(path, layout=whole)
        assert [task.columns for task in TaskFile(path)] == [{}, {}]
    first, second = (task.columns for task in tasks)
    assert first == {**named, "ability": "art"}
    assert (second["agent_name"], second["ability"]) == (None, "math")
    assert tasks.texts_of("agent_name") == {"twice": 0}
    assert tasks.texts_of("data_source") == {"sums": 0}
