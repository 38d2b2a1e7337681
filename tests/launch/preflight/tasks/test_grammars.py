"""The grammars of all tasks are read before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.data.reading import TaskFile
from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError
from asyncrl.launch.preflight.tasks.grammars import check_grammars
from tests.helpers import make_task

REGEX = '{"type": "regex", "regex": "[ab]+"}'


def check(folder: Path, *forms: Any, kind: str = "sglang", tools: tuple[str, ...] = (), temperature: float = 1) -> None:
    """Check the start with one task for each form. None makes a task without a form."""
    tasks = [make_task(row, extra_info={"index": row, "response_format": form}) for row, form in enumerate(forms)]
    write_tasks(folder / "tasks.parquet", tasks)
    config = TrainConfig(model=ModelConfig(path="unused"))
    config.engine.kind, config.actor.tools, config.actor.temperature = kind, list(tools), temperature
    check_grammars(config.engine.kind, config.actor, [TaskFile(folder / "tasks.parquet")])


def test_tasks_with_forms_and_without_are_taken(tmp_path: Path) -> None:
    check(tmp_path, None, REGEX, None, '{"type": "text"}', REGEX)
    check(tmp_path, None, None, kind="embedded", tools=("calculator",))
    check(tmp_path, None, '{"type": "text"}', kind="embedded", tools=("calculator",))


def test_a_form_that_cannot_be_read_is_refused_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tasks.parquet: row 2: extra_info.response_format is .*yaml.*; use"):
        check(tmp_path, REGEX, None, '{"type": "yaml"}')


def test_a_form_that_is_no_text_is_refused_since_parquet_would_fill_its_gaps_with_nulls(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"extra_info.response_format must be JSON text"):
        check(tmp_path, {"type": "regex", "regex": "[ab]+"})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "embedded"}, "engine.kind=embedded samples without grammars"),
        ({"tools": ("calculator",)}, "set actor.tools="),
        ({"temperature": 0.5}, "a turn under a grammar is not trained with actor.temperature=0.5"),
    ],
)
def test_a_form_that_this_run_cannot_serve_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        check(tmp_path, None, REGEX, **options)
