"""The column of images of verl's files: each mark in a prompt becomes the next image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data.layout import RowLayout
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError

PICTURES = [{"bytes": b"one", "path": None}, {"bytes": b"two", "path": "2.png"}]


def row(text: str, images: Any, column: str = "images") -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Look."}, {"role": "user", "content": text}]
    return {"prompt": prompt, "data_source": "geo", "reward_model": {"ground_truth": "4"}, column: images}


def parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_each_mark_in_a_prompt_becomes_the_next_image_of_its_row(tmp_path: Path) -> None:
    file = parquet(tmp_path, row("<image>and<image> Which?", PICTURES), row("No <image> here.", None), row("None.", []))
    with_two, without, empty = TaskFile(file)
    assert with_two.messages[0] == {"role": "system", "content": [{"type": "text", "text": "Look."}]}
    assert with_two.messages[1]["content"] == [
        {"type": "image", "image": {"bytes": b"one"}},
        {"type": "text", "text": "and"},
        {"type": "image", "image": {"bytes": b"two", "path": "2.png"}},
        {"type": "text", "text": " Which?"},
    ]
    assert without.messages[1]["content"] == "No <image> here."
    assert empty.messages[1]["content"] == "None."


def test_json_lines_name_images_by_path_and_a_column_may_have_another_name(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row("<image>?", ["cats/1.png"], "pictures")))
    [task] = TaskFile(file, layout=RowLayout({"images": "pictures"}))
    assert task.messages[1]["content"] == [{"type": "image", "image": "cats/1.png"}, {"type": "text", "text": "?"}]
    file.write_text(json.dumps(row("<image>?", [{"image": "file://a.png"}])))
    assert TaskFile(file)[0].messages[1]["content"][0] == {"type": "image", "image": "file://a.png"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_with_another_number_of_images_than_marks_is_refused_by_its_place(tmp_path: Path, kind: str) -> None:
    rows = [row("<image>", ["a.png"]), row("<image>", ["a.png", "b.png"])]
    file = parquet(tmp_path, *rows)
    if kind == "jsonl":
        file = tmp_path / "tasks.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
    where = "row 1" if kind == "parquet" else "line 2"
    with pytest.raises(DataError, match=rf"{where}, column images: 2 images, but 1 times <image> in the texts"):
        TaskFile(file)


def test_a_column_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column images must be a list of images in each row, not string"):
        TaskFile(parquet(tmp_path, row("Hello", "a.png")))
