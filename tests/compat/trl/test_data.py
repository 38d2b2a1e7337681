"""The data of a script is the same rows here, or the report says how to make a file of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.compat.trl.command import translate
from asyncrl.data.query import SourceQuery
from tests.compat.trl.scripts import has, of_script


def test_parts_of_a_file_are_written_once_and_are_not_the_whole_file(tmp_path: Path) -> None:
    result = translate(
        of_script(
            tmp_path,
            "train = load_dataset('json', data_files='d.jsonl', split='train[:90%]')\n"
            "held = load_dataset('json', data_files='d.jsonl', split='train[90%:]')\n"
            "GRPOTrainer('m', train_dataset=train, eval_dataset=held)\n",
        )
    )
    assert (result.settings["data.train"], result.settings["data.eval"]) == (["train.parquet"], ["eval.parquet"])
    assert has(result.differs, "train_dataset:", "by train.to_parquet('train.parquet')")
    assert has(result.differs, "eval_dataset:", "by held.to_parquet('eval.parquet')")


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        ("'json', data_files='d.jsonl', split='train'", "d.jsonl"),
        ("'json', None, None, 'd.jsonl', 'train'", "d.jsonl"),
        ("'json', data_files='d.jsonl', split='train+test'", "train.parquet"),
        ("'org/ds', split='train', revision='abc'", "hub:org/ds?split=train&revision=abc"),
        ("'org/ds', 'main', split='train', num_proc=4, token='t'", "hub:org/ds?config=main&split=train"),
        ("'org/ds', 'main', 'algebra', split='train'", "train.parquet"),
        ("'org/ds', split='train', data_dir='algebra'", "train.parquet"),
    ],
)
def test_arguments_that_choose_rows_are_translated_or_reported(tmp_path: Path, arguments: str, source: str) -> None:
    result = translate(of_script(tmp_path, f"d = load_dataset({arguments})\nGRPOTrainer('m', train_dataset=d)\n"))
    assert result.settings["data.train"] == [source]
    assert has(result.differs, "train_dataset: the script makes the rows itself") == (source == "train.parquet")


@pytest.mark.parametrize("split", ["train+test", "train[10%:20%]"])
def test_a_source_on_the_hub_keeps_the_split_as_it_is(tmp_path: Path, split: str) -> None:
    loads = f"d = load_dataset('org/ds', split={split!r})\nGRPOTrainer('m', train_dataset=d)\n"
    [source] = translate(of_script(tmp_path, loads)).settings["data.train"]
    assert SourceQuery.of(source, "").values == {"split": split}


def test_a_data_set_of_a_mixture_whose_rows_no_source_has_is_left_out_and_named() -> None:
    mixture = [
        {"path": "org/a", "revision": "abc"},
        {"path": "org/b", "data_dir": "algebra", "columns": ["prompt"]},
        {"path": "json", "data_files": "d.jsonl", "split": "train[:90%]"},
        {"path": "json", "data_files": "e.jsonl"},
    ]
    result = translate({"datasets": mixture})
    assert result.settings["data.train"] == ["hub:org/a?split=train&revision=abc", "e.jsonl"]
    assert has(result.differs, "org/b is left out", "(split=train, data_dir=algebra)")
    assert has(result.differs, "json is left out", "(split=train[:90%], data_files=d.jsonl)")
    assert has(result.differs, "columns of org/b are left out")
