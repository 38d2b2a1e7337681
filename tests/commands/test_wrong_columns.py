"""Each command refuses data with other columns before it loads torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import GENEROUS_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["evaluate", "policy", "--data", "other.jsonl"],
            "other.jsonl has no column prompt, data_source, reward_model",
        ),
        (["try", "other.jsonl", "model.path=policy"], "other.jsonl has no column prompt, data_source, reward_model"),
        (
            ["sft", "model.path=policy", "data.train=other.jsonl"],
            "demonstrations need a column messages, or the columns prompt and response; it has query, result",
        ),
    ],
)
def test_wrong_columns_are_refused_before_torch_is_loaded(tmp_path: Path, words: list[str], reason: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "other.jsonl").write_text('{"query": "1+1?", "result": 2}\n')
    code = (
        f"import sys; from asyncrl.__main__ import main; status = main({words!r}); "
        "print(status, {'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GENEROUS_S, check=True, cwd=tmp_path
    )
    assert done.stdout == "2 set()\n"
    assert reason in done.stderr
