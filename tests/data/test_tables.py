"""Task files of every kind, alone and together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import tables
from asyncrl.data.reading import TaskFile
from asyncrl.data.tables import find_files
from asyncrl.errors import DataError


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"What is {number}+1?"}],
        "data_source": "sums",
        "reward_model": {"ground_truth": str(number + 1)},
        **changes,
    }


ROW_0 = row(0)


def parquet(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return path


def datasets_folder(folder: Path, *streams: Sequence[Mapping[str, Any]]) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(streams):05d}.arrow" for number in range(len(streams))]
    for name, rows in zip(names, streams, strict=True):
        table = pa.Table.from_pylist(list(rows))
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_the_same_rows_are_the_same_tasks_in_every_kind_of_file(tmp_path: Path) -> None:
    rows = [row(number, extra_info={"index": number, "split": "train"}) for number in range(4)]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "parts").mkdir()
    lines(tmp_path / "parts" / "a.jsonl", *rows[:3])
    parquet(tmp_path / "parts" / "b.parquet", *rows[3:])
    expected = list(TaskFile(parquet(tmp_path / "tasks.parquet", *rows)))
    assert [task.id for task in expected] == [f"sums/train/{number}" for number in range(4)]
    for sources in (
        lines(tmp_path / "tasks.jsonl", *rows),
        lines(tmp_path / "lines.json", *rows),
        tmp_path / "list.json",
        tmp_path / "parts",
        str(tmp_path / "parts" / "?.*"),
        [tmp_path / "parts" / "a.jsonl", tmp_path / "parts" / "b.parquet"],
        datasets_folder(tmp_path / "arrow", rows[:1], rows[1:]),
    ):
        assert list(TaskFile(sources)) == expected


def test_files_with_other_columns_and_fields_become_one_table(tmp_path: Path) -> None:
    tool = json.dumps([{"name": "add"}])
    named = [{"role": "user", "content": "x", "name": "me"}]
    first = parquet(tmp_path / "a.parquet", row(0, extra_info={"index": 0}), row(1, extra_info={"index": 1}))
    second = lines(tmp_path / "b.jsonl", row(2, tools=tool, extra_info={"level": "hard"}, prompt=named))
    tasks = TaskFile([first, second])
    assert [task.extra_info for task in tasks] == [{"index": 0}, {"index": 1}, {"level": "hard"}]
    assert [len(task.tools) for task in tasks] == [0, 0, 1]
    assert [list(task.messages[0]) for task in tasks] == [["role", "content"]] * 2 + [["role", "content", "name"]]


def test_ids_tell_the_rows_of_files_apart(tmp_path: Path) -> None:
    rows = [row(number, extra_info={"index": number}) for number in range(2)]
    files = [parquet(tmp_path / name / "train.parquet", *rows) for name in ("a", "b")]
    assert [task.id for task in TaskFile(files)] == [f"sums/train/{number}" for number in range(4)]
    other = parquet(tmp_path / "test.parquet", *rows)
    assert [task.id for task in TaskFile([files[0], other])] == [
        *("sums/train/0", "sums/train/1", "sums/test/0", "sums/test/1")
    ]


SPLITS = st.sampled_from([None, "train", "test"])
FILES = st.lists(st.lists(st.tuples(SPLITS, st.integers(0, 3)), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.slow
@given(files=FILES, stems=st.lists(st.sampled_from(["x", "train"]), min_size=3, max_size=3))
def test_no_two_rows_of_any_files_have_the_same_id(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[str | None, int]]], stems: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ids"
    paths = [
        parquet(
            folder / str(k) / f"{stems[k]}.parquet", *(row(0, extra_info={"split": s, "index": i}) for s, i in rows)
        )
        for k, rows in enumerate(files)
    ]
    ids = [task.id for task in TaskFile(paths)]
    assert len(set(ids)) == len(ids)


def test_values_stay_as_they_are_written(tmp_path: Path) -> None:
    dated = row(0, reward_model={"ground_truth": "2021-05-05"}, extra_info={}, tools=None)
    (task,) = TaskFile(lines(tmp_path / "x.jsonl", dated))
    assert (task.ground_truth, task.extra_info, task.tools) == ("2021-05-05", {}, ())


def test_a_bad_row_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    good = parquet(tmp_path / "a.parquet", row(0), row(1))
    bad = lines(tmp_path / "b.jsonl", row(2), row(3, prompt=[]), row(4))
    with pytest.raises(DataError, match=r"b\.jsonl: line 2, column prompt has no messages"):
        TaskFile([good, bad])
    again = parquet(tmp_path / "c.parquet", row(2), row(3, prompt=[]))
    with pytest.raises(DataError, match=r"c\.parquet: row 1, column prompt has no messages"):
        TaskFile([good, again])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 1}\nno json\n', "x.json.*: line 2 is not a JSON object"),
        ('{"prompt": 1}\n\n{"prompt": 1}\n', "x.json.*: line 2 is empty"),
        ("3\n", "x.json.*: line 1 is not a JSON object"),
        ('{"x": NaN}\n', "x.json.*: line 1 is not a JSON object"),
        ('{"x": 1}\n', "has no column prompt, data_source, reward_model; it has x"),
        ("", "x.json.* has no rows"),
        ("{}\n", "has no column prompt"),
        (json.dumps({**ROW_0, "extra_info": "x"}), "x.json.*: line 1 .*extra_info must be a struct"),
        (json.dumps({**ROW_0, "prompt": ["?"]}), "x.json.*: line 1 .*a message without a role"),
        (json.dumps({**ROW_0, "prompt": [{"role": 3}]}), "x.json.*: line 1 .*role of a message must be text"),
        (json.dumps({**ROW_0, "data_source": ["s"]}), "x.json.*: line 1 .*data_source must be text"),
        (json.dumps({**ROW_0, "extra_info": {"split": ["s"]}}), "x.json.*: line 1 .*extra_info.split must be text"),
        (json.dumps({**ROW_0, "extra_info": {"tools_kwargs": []}}), "x.json.*: line 1 .*tools_kwargs must be a struct"),
        (json.dumps({**ROW_0, "reward_model": "4"}), "x.json.*: line 1 .*reward_model must be a struct"),
        (json.dumps({**ROW_0, "environment": ["a"]}), "x.json.*: line 1 .*environment must be text"),
        (json.dumps({**ROW_0, "tools": [{"name": 3}]}), "x.json.*: line 1, column tools is neither schemas"),
        (json.dumps({**ROW_0, "tools": 3}), "x.json.*: line 1, column tools is neither schemas"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_lines_that_are_no_rows_are_refused_with_their_number(
    tmp_path: Path, text: str, message: str, suffix: str
) -> None:
    (tmp_path / "x").with_suffix(suffix).write_text(text)
    with pytest.raises(DataError, match=message):
        TaskFile((tmp_path / "x").with_suffix(suffix))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[3]", "is not a JSON list of objects"),
        ("[]", "has no rows"),
        ('[{"x": 1}, {"y": "y"}]', "has no column prompt, data_source, reward_model; it has x, y"),
    ],
)
def test_a_json_list_that_holds_no_rows_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        TaskFile(tmp_path / "x.json")


def test_rows_of_many_parts_have_their_own_columns_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 2)
    truths = [1, 2, "3", [4], 5.5, 6]
    given = [row(n, reward_model={"ground_truth": truth}) for n, truth in enumerate(truths)]
    tasks = TaskFile(lines(tmp_path / "x.jsonl", *given[:2], {**given[2], "extra_info": {"index": 2}}, *given[3:]))
    assert repr([task.ground_truth for task in tasks]) == repr(truths)
    assert [task.extra_info for task in tasks] == [{}, {}, {"index": 2}, {}, {}, {}]


def test_files_of_other_types_keep_their_values(tmp_path: Path) -> None:
    files = [
        parquet(tmp_path / f"{name}.parquet", row(0, reward_model={"ground_truth": truth}, extra_info=extra))
        for name, truth, extra in (("a", 1, {"level": 1}), ("b", 2.5, {"level": 0.5}), ("c", "3", {"level": "high"}))
    ]
    tasks = TaskFile([*files, lines(tmp_path / "d.jsonl", row(0, reward_model={"ground_truth": {"x": None}}))])
    assert repr([task.ground_truth for task in tasks]) == repr([1, 2.5, "3", {"x": None}])
    assert repr([dict(task.extra_info) for task in tasks[:3]]) == repr(
        [{"level": 1}, {"level": 0.5}, {"level": "high"}]
    )
    assert tasks.place(3) == f"{tmp_path}/d.jsonl: line 1"
    assert tasks.extra_texts("none") == {}


def test_a_folder_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    for split in ("test", "train"):
        datasets_folder(tmp_path / "both" / split, [row(0)])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits: name the folder of one, such as .*both/test or .*both/train"):
        TaskFile(tmp_path / "both")
    assert len(TaskFile(tmp_path / "both" / "train")) == 1


def test_a_folder_of_datasets_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = datasets_folder(tmp_path / "arrow", [row(0)])
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="cannot be read as a folder of `datasets`"):
        TaskFile(folder)


def test_folders_and_patterns_without_files_are_refused_with_what_to_name(tmp_path: Path) -> None:
    parquet(tmp_path / "outer" / "inner" / "x.parquet", row(0))
    with pytest.raises(DataError, match=r"name a folder within it, such as .*outer/inner"):
        TaskFile(tmp_path / "outer")
    with pytest.raises(DataError, match="no file matches it as a pattern"):
        TaskFile(str(tmp_path / "*.jsonl"))


def hub_cache(folder: Path, *names: str) -> None:
    """A data set in the cache of the hub, as a download leaves it."""
    repo = folder / "datasets--them--sums"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    for name in names:
        parquet(repo / "snapshots" / ("a" * 40) / name, row(0), row(1))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub that cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_data_set_of_the_hub_is_read_from_the_cache(offline: Path) -> None:
    hub_cache(offline, "main/train-0.parquet", "main/train-1.parquet", "main/test-0.parquet")
    assert len(TaskFile("hf://datasets/them/sums/main/train-*.parquet")) == 4
    assert len(TaskFile("hf://datasets/them/sums@main/main")) == 6
    assert TaskFile("hf://datasets/them/sums/main/test-0.parquet")[0].id == "sums/test-0/0"
    with pytest.raises(DataError, match="its files are in folders; name one"):
        TaskFile("hf://datasets/them/sums")
    with pytest.raises(DataError, match="no file or folder extra"):
        TaskFile("hf://datasets/them/sums/extra")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://datasets/them/sums/main", "cannot be loaded, and is not in the local cache"),
        ("hf://datasets/them", "is named hf://datasets/OWNER/NAME,"),
        ("hf://models/them/sums", "is named hf://datasets/OWNER/NAME,"),
        ("hf://datasets/th em/sums", "cannot be loaded"),
    ],
)
def test_a_name_that_the_hub_cannot_give_is_refused(offline: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_files(source)


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    # From Python 3.13 on it is a pattern.
    with pytest.raises(DataError, match=r"a\*\*b(: the file does not exist| is not a pattern)"):
        TaskFile(tmp_path / "a**b")


ROW = b'{"prompt": [{"role": "user", "content": "?"}], "data_source": "s", "reward_model": {"ground_truth": "4"}}'


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ROW), ("a.json", ROW), ("a.json", b"[" + ROW + b"]")])
def test_the_mark_that_windows_writes_before_json_is_no_part_of_it(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert TaskFile(tmp_path / name)[0].ground_truth == "4"


def test_an_empty_line_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW + b"\n \n")
    with pytest.raises(DataError, match=r"a\.jsonl: line 2 is empty; delete it"):
        TaskFile(tmp_path / "a.jsonl")
