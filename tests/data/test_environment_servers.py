"""Tasks of servers and files of environments of others: OpenEnv, and the data of NeMo Gym."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.command import convert
from asyncrl.data.converters import openenv
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError

Answers = Mapping[str, tuple[int, Any]]

ABOUT: Answers = {
    "GET /metadata": (200, {"name": "maze", "description": "Find the way out."}),
    "GET /list_environments": (200, ["maze"]),
}


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """The address of a server with these answers to requests. A number of tasks is that of the split's name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*answers.get(f"{self.command} {self.path}", (404, {"detail": "Not Found"})))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def _answer(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *said: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_without_a_list_of_tasks_has_one_for_each_seed(tmp_path: Path):
    without = {**ABOUT, "POST /maze/num_tasks": (501, {"detail": "num_tasks is not supported"})}
    with answering(without) as url:
        convert("openenv", url, tmp_path / "a.parquet", limit=3, first=5)
        convert("openenv", url, tmp_path / "b.parquet", "eval", limit=1, prompt="Walk.")
    tasks = list(TaskFile(tmp_path / "a.parquet"))
    assert [task.id for task in tasks] == [f"openenv/maze/train/{seed}" for seed in (5, 6, 7)]
    assert [json.loads(task.extra_info["openenv"]) for task in tasks] == [{"seed": seed} for seed in (5, 6, 7)]
    assert tasks[0].messages == [{"role": "user", "content": "Find the way out."}]
    [other] = TaskFile(tmp_path / "b.parquet")
    assert other.messages[0]["content"] == "Walk."


@pytest.mark.parametrize("counted", [(501, {}), (200, {"num_tasks": 4})])
def test_a_limit_of_0_asks_for_no_task(counted: tuple[int, Any]):
    with answering({**ABOUT, "POST /maze/num_tasks": counted}) as url:
        assert list(openenv.tasks(url, "train", limit=0)) == []


def test_a_server_with_a_list_gives_its_tasks_by_their_place(tmp_path: Path):
    with answering({**ABOUT, "POST /maze/num_tasks": (200, {"num_tasks": 4})}) as url:
        convert("openenv", url, tmp_path / "a.parquet", "test", first=2)
        convert("openenv", url, tmp_path / "b.parquet", "test", limit=1)
    tasks = list(TaskFile(tmp_path / "a.parquet"))
    assert [json.loads(task.extra_info["openenv"]) for task in tasks] == [
        {"split": "test", "index": index} for index in (2, 3)
    ]
    assert len(TaskFile(tmp_path / "b.parquet")) == 1


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({}, "metadata answered with status 404"),
        ({**ABOUT, "GET /list_environments": (200, {})}, "is not an OpenEnv server"),
        ({**ABOUT, "POST /maze/num_tasks": (500, "oh")}, "num_tasks answered with status 500: b'\"oh\"'"),
        ({**ABOUT, "POST /maze/num_tasks": (200, {"num": 3})}, "answered num_tasks with"),
    ],
)
def test_a_server_that_answers_otherwise_is_refused(answers: Answers, reason: str, tmp_path: Path):
    with answering(answers) as url, pytest.raises(DataError, match=reason):
        convert("openenv", url, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be reached"):
        convert("openenv", url, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="give the address"):
        convert("openenv", "maze", tmp_path / "a.parquet")


def test_lines_of_nemo_gym_are_tasks_that_keep_them(tmp_path: Path):
    rows = [
        {"responses_create_params": {"input": "How warm is it?", "instructions": "Be brief."}, "expected": 3},
        {
            "responses_create_params": {
                "input": [
                    {"role": "developer", "content": "Use tools."},
                    {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image"}]},
                    {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
                ]
            },
            "agent_ref": {"type": "responses_api_agents", "name": "looker"},
        },
        {"responses_create_params": {"input": []}},
    ]
    path = tmp_path / "weather.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert convert("nemo-gym", str(path), tmp_path / "tasks.parquet") == (2, 1)
    first, second = TaskFile(tmp_path / "tasks.parquet")
    assert first.data_source == "nemo-gym/weather"
    assert first.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm is it?"},
    ]
    assert json.loads(first.extra_info["nemo_gym"]) == rows[0]
    assert second.id == "nemo-gym/looker/train/1"
    assert second.messages == [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "See\n(input_image)"},
    ]


def test_a_line_of_nemo_gym_ends_only_at_a_line_break_and_keeps_its_number_after_empty_lines(tmp_path: Path):
    row = {"responses_create_params": {"input": "a\u2028b\x85c"}}
    path = tmp_path / "weather.jsonl"
    path.write_bytes(f"\n{json.dumps(row, ensure_ascii=False)}\r\n\n{{".encode())
    with pytest.raises(DataError, match="line 4 has no responses_create_params"):
        convert("nemo-gym", str(path), tmp_path / "tasks.parquet")
    path.write_bytes(path.read_bytes()[:-1])
    convert("nemo-gym", str(path), tmp_path / "tasks.parquet")
    [task] = TaskFile(tmp_path / "tasks.parquet")
    assert task.id == "nemo-gym/weather/train/0"
    assert task.messages == [{"role": "user", "content": "a\u2028b\x85c"}]


@pytest.mark.parametrize("line", ["{", "3", '{"question": 3}', '{"responses_create_params": {"input": [3]}}'])
def test_a_line_of_another_form_is_refused_by_its_number(line: str, tmp_path: Path):
    path = tmp_path / "weather.jsonl"
    path.write_text('{"responses_create_params": {"input": "a"}}\n' + line)
    with pytest.raises(DataError, match="line 2 has no responses_create_params"):
        convert("nemo-gym", str(path), tmp_path / "tasks.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        convert("nemo-gym", str(tmp_path / "nowhere"), tmp_path / "tasks.parquet")
