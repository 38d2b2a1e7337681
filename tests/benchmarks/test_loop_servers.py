"""The arguments that benchmarks.gpu_loop gives to its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import loop_servers
from benchmarks.gpu_loop import command_line
from benchmarks.loop_servers import SERVER_MEMORY, Fitted, own_arguments
from benchmarks.shapes import make_model

H200 = 141 * 10**9
LONGEST = 2048


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loop_servers, "installed_version", lambda *_: (0, 5, 17))
    monkeypatch.setattr(loop_servers, "gpu_bytes", lambda _: H200)
    make_model("2.5M").save_pretrained(tmp_path)
    return tmp_path


def given(model: Path, servers: int, gpu: int, *words: str) -> tuple[float | None, list[str]]:
    options = command_line().parse_args(["--python", "p", *words])
    return Fitted(options, model, LONGEST, 512, servers).on(gpu)


def test_a_server_gets_what_a_run_would_give_it_and_then_the_users_arguments(model: Path) -> None:
    memory, arguments = given(model, 1, 1, "--gpus", "2", "--server=--attention-backend fa3")
    assert memory == SERVER_MEMORY
    expected = ["--max-running-requests", "520", "--cuda-graph-max-bs-decode", "520", "--attention-backend", "fa3"]
    assert arguments == expected
    assert "--cuda-graph-max-bs-decode" not in given(model, 1, 1, "--gpus", "2", "--server=--disable-cuda-graph")[1]


def test_a_server_on_the_learners_gpu_has_a_share_of_its_memory(model: Path) -> None:
    memory, _ = given(model, 1, 0, "--gpus", "1")
    assert memory == 0.41


def test_several_servers_on_a_gpu_are_told_the_size_of_their_cache(model: Path) -> None:
    memory, arguments = given(model, 2, 1, "--gpus", "2", "--per-gpu", "2")
    assert memory is None
    assert arguments[-4:] == ["--mem-fraction-static", "0.95", "--max-total-tokens", str(328 * LONGEST)]


def test_servers_on_the_cpu_get_the_users_arguments_only(model: Path) -> None:
    assert given(model, 1, 0, "--gpus", "0", "--server=--a 'b c'") == (None, ["--a", "b c"])
    assert own_arguments(command_line().parse_args([])) == []
