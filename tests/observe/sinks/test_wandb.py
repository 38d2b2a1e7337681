"""The records that Weights & Biases keeps offline, read out of its own files: `wandb sync` sends just these."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observe.sinks.support import HOSTILE

pytestmark = pytest.mark.slow
pytest.importorskip("wandb")

HEADER, BLOCK = 7, 1 << 15
FULL, LAST = 1, 4
SECRET = "s3cr3t"
PROGRAM = """
import sys
from pathlib import Path
from asyncrl.observe.sinks.wandb import Wandb
from tests.observe.sinks.support import play, source
folder = Path(sys.argv[1])
play(lambda: Wandb(source(folder)), folder / "model")
"""


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb: protocol buffers in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at < len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders that two processes of one learner left, of which the second one went on after the first."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    environment = {"PATH": "", "HOME": str(folder), "WANDB_MODE": "offline", "PYTHONPATH": ":".join(sys.path)}
    environment |= {"SOME_API_KEY": SECRET}
    command = [sys.executable, "-c", PROGRAM, str(folder), f"engine.server.arguments=[--api-key,{SECRET}]"]
    subprocess.run(command, check=True, env=environment, timeout=300)
    return sorted((folder / "wandb").glob("offline-run-*"))


def test_a_role_that_starts_again_continues_its_own_run_in_the_group_of_the_run(runs: list[Path]) -> None:
    found = [each.run for run in runs for each in records(*run.glob("*.wandb")) if each.HasField("run")]
    assert len(runs) == 2
    assert {each.run_id for each in found} == {"0123abcd-learner"}
    assert {each.run_group for each in found} == {runs[0].parents[1].name}
    assert {each.job_type for each in found} == {"learner"}
    config = {item.key: json.loads(item.value_json) for each in found for item in each.config.update}
    assert config["learner"] == {"steps": 4}


def test_neither_the_command_line_nor_the_environment_is_kept(runs: list[Path]) -> None:
    files = [path for path in runs[0].parent.rglob("*") if path.is_file()]
    assert any(b"0123abcd-learner" in path.read_bytes() for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def rows(run: Path) -> list[dict[str, Any]]:
    history = [each.history.item for each in records(*run.glob("*.wandb")) if each.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in history]


def test_values_are_curves_over_the_learners_steps(runs: list[Path]) -> None:
    first, second = (rows(run) for run in runs)
    assert [(row["step"], row["loss"]) for row in first if "loss" in row] == [(0, 1.0), (1, 0.0), (2, -1.0)]
    assert [(row["step"], row["loss"]) for row in second if "loss" in row] == [(2, 8.0), (3, 7.0)]
    axes = [each.metric for each in records(*runs[0].glob("*.wandb")) if each.HasField("metric")]
    assert any(each.glob_name == "*" and each.step_metric == "step" for each in axes)


def test_histograms_tables_and_models_are_kept(runs: list[Path]) -> None:
    [histogram] = [row for row in rows(runs[0]) if "histogram/lag/_type" in row]
    assert (histogram["step"], histogram["histogram/lag/values"]) == (2, [3.0, 1.0])
    assert histogram["histogram/lag/bins"] == [-0.5, 0.5, 1.5]
    tables = sorted(runs[1].glob("files/media/table/*.json"))
    assert [table.name.startswith("held_out_episodes") for table in tables] == [False, True]
    for content in (json.loads(table.read_text()) for table in tables):
        assert content["columns"] == ["id", "reward", "episode"]
        assert content["data"] == [["a", 0.5, f"user: 6 * 7?\n\nassistant: {HOSTILE}"]]
    artifacts = [each for each in records(*runs[1].glob("*.wandb")) if each.HasField("artifact")]
    [model] = [each.artifact for each in artifacts if each.artifact.type == "model"]
    assert [item.path for item in model.manifest.contents] == ["model.safetensors"]
    assert set(model.aliases) == {"latest", "step-4"}
