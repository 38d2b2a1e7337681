"""The requests that the page's server answers, and the content of its answers about runs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession

from asyncrl.dashboard import server
from asyncrl.dashboard.__main__ import BOUNDS
from asyncrl.dashboard.access import MOST_OTHERS, Access, is_local
from asyncrl.dashboard.runs import shown_runs
from asyncrl.errors import ConfigError
from asyncrl.machine.doing import Doing
from asyncrl.machine.ports import LOOPBACK
from asyncrl.runs.run import Run
from tests.dashboard.support import TOKEN, answer, answers, dashboard, make_run, served, values
from tests.helpers import until
from tests.runs.inspect.support import write_config


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/runs", "/api/table", "/api/runs/one/overview", "/nothing"])
def test_nothing_is_told_without_the_token(tmp_path: Path, path: str) -> None:
    for token in ("", "another", TOKEN[:-1], "\xff"):
        assert answer([make_run(tmp_path / "one")], path, token=token)[0] == 403


def test_the_address_with_the_token_makes_the_browser_remember_it(tmp_path: Path) -> None:
    status, headers, _ = answer([make_run(tmp_path / "one")], f"/?token={TOKEN}", token="")
    assert status == 200
    cookie = headers["Set-Cookie"]
    assert TOKEN in cookie
    assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}


def test_a_browser_keeps_the_cookies_of_the_newest_dashboards_only(tmp_path: Path) -> None:
    others = [Access(f"token {number}").cookie for number in range(MOST_OTHERS + 2)]
    sent = "; ".join(f"{name}=token" for name in ("of_another_site", *others))

    async def forgotten(port: int) -> list[str]:
        async with (
            ClientSession(headers={"Cookie": sent}) as session,
            session.get(f"http://{LOOPBACK}:{port}/?token={TOKEN}") as found,
        ):
            return [name for name, cookie in found.cookies.items() if cookie["max-age"] == "0"]

    assert served([make_run(tmp_path / "one")], forgotten) == others[:2]


def test_another_site_can_neither_take_the_server_for_its_own_nor_frame_the_page(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "one")
    assert answer([run], "/", headers={"Host": "evil.example"})[0] == 421
    assert answer([run], "/", headers={"Host": "localhost:9"})[0] == 200  # an SSH tunnel
    policy = answer([run], "/")[1]["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.slow
def test_a_browser_gets_a_file_of_this_user_and_not_the_token_in_its_arguments(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$@" > {told}.part\nmv {told}.part {told}\n')
    script.chmod(0o700)
    with dashboard(make_run(tmp_path / "one"), options=["--open"], browser=str(script)) as url:
        until(told.exists)
        arguments = told.read_text().strip()
        token = url.partition("token=")[2]
        assert len(token) > 20
        assert token not in arguments
        page = Path(urlsplit(arguments).path)
        assert url in page.read_text()
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
    assert not page.parent.exists()


@pytest.mark.slow
def test_an_unexpected_error_is_logged_with_one_traceback_and_then_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("x" * 10_000 + "\nforged line")

    monkeypatch.setattr(server, "catalogue", fail)
    run = make_run(tmp_path / "one")
    assert [status for status, _, _ in answers([run], ["/api/runs/one/catalogue"] * 50)] == [500] * 50
    assert len(caplog.records) == 1
    assert len(caplog.messages[0].splitlines()) == 1
    assert len(caplog.messages[0]) < 1000


def test_bytes_that_are_no_request_are_lines_of_bounded_number_and_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def send(port: int) -> None:
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /" + b"x" * 9000 + b" HTTP/9\r\n\r\n")
            assert b" 400 " in await reader.read()
            writer.close()

    served([make_run(tmp_path / "one")], send)
    assert 1 <= len(caplog.records) < 50
    assert all(len(line) < 1000 and line.startswith("the page's port received") for line in caplog.messages)
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.slow
def test_strangers_keep_nobody_with_the_token_from_the_page(tmp_path: Path) -> None:
    async def visit(port: int) -> int:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(BOUNDS.connections)]
        for _, writer in strangers:
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/?token={TOKEN}") as found:
            assert await strangers[0][0].read() == b""
            for _, writer in strangers:
                writer.close()
            return found.status

    assert served([make_run(tmp_path / "one")], visit) == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.0.0.1:80", "LocalHost:8080", "[::1]:1", "[::1]")],
        *[(host, False) for host in ("", "localhost.evil.example", "127.0.0.1.evil", "localhost:", "a@localhost")],
    ],
)
def test_only_names_of_this_machine_are_its_own(host: str, local: bool) -> None:
    assert is_local(host) is local


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    assert answer([make_run(tmp_path / "one")], "/api/runs", method=method)[0] == 405


def test_files_outside_of_the_page_and_the_metrics_are_not_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    (run / "secret.jsonl").write_text("{}\n")
    for path in ("/../server.py", "/%2e%2e/server.py", "/api/runs/one/series?file=../secret", "/api/runs/two/overview"):
        assert answer([run], path)[0] == 404


def test_a_run_has_a_key_for_addresses_whatever_its_name_is(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("a b", "a_b", "<script>\u202e", "\udcff")]
    runs = shown_runs(map(str, folders))
    assert list(runs) == ["a_b", "a_b-2", "_script_", "_"]
    assert [run["name"] for run in values(folders, "/api/runs")] == [folder.name for folder in folders]


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert list(shown_runs([str(tmp_path)])) == ["one", "two"]
    assert list(shown_runs([str(tmp_path / "two"), str(tmp_path)])) == ["two", "one"]


def test_what_is_no_run_is_refused_with_how_to_mend_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder of a run"):
        shown_runs([str(tmp_path / "nothing")])


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / place / "run") for place in ("old", "new")]
    assert [run.name for run in shown_runs(map(str, folders)).values()] == ["old/run", "new/run"]


def test_a_run_without_a_configuration_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    found = values([make_run(tmp_path / "one")], "/api/runs/one/overview")
    assert found["configuration"] == {}
    assert found["steps"] is None
    assert found["state"] == "stopped"


@pytest.mark.slow
def test_a_silent_role_is_a_warning_and_stands_among_the_roles(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_config(run)
    names = ("learner", "scoring-0")
    (run / "processes.json").write_text(json.dumps({name: {"host": "here", "pid": 7, "restarts": 0} for name in names}))
    (run / "supervised").write_text('{"host": "another", "pid": 7}')
    (run / "alive").mkdir()
    for name in names:
        (run / "alive" / name).touch()
        Doing("work", 0.0).write(run / "alive" / name)
    os.utime(run / "alive" / "scoring-0", (1000.0, 1000.0))
    found = values([run], "/api/runs/one/overview")
    assert found["roles"]["learner"]["fault"] is None
    assert found["roles"]["scoring-0"]["fault"].startswith("has been silent for ")
    assert [each.split(" for ")[0] for each in found["warnings"]] == ["scoring-0 has been silent"]


@pytest.mark.slow
def test_the_configuration_shows_each_part_of_the_algorithm_that_is_not_as_by_default(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_config(run)
    shown = values([run], "/api/runs/one/overview")["configuration"]
    usual = {name: text for name, text in shown.items() if name.startswith("algorithm.")}
    assert usual == {"algorithm.advantage": "grpo", "algorithm.loss": "ppo"}
    parts = {
        "loss": {"name": "ppo", "params": {"clip_low": 0.2, "clip_high": 0.28}},
        "correction": [{"name": "mask", "params": {"level": "token"}}, {"name": "zero_variance"}],
        "entropy_weight": 0.01,
    }
    config = {"model": {"path": "m"}, "data": {"train": ["tasks.parquet"]}, "algorithm": parts}
    (run / "config.yaml").write_text(json.dumps(config))
    shown = values([run], "/api/runs/one/overview")["configuration"]
    assert shown["algorithm.loss"] == "ppo (clip_low=0.2, clip_high=0.28)"
    assert shown["algorithm.correction"] == "mask (level=token), zero_variance"
    assert shown["algorithm.entropy_weight"] == "0.01"


@pytest.mark.slow
def test_what_is_no_regular_file_among_the_metrics_holds_up_no_answer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_config(run)
    os.mkfifo(run / "metrics" / "replay.jsonl")
    (run / "metrics" / "actor-0.jsonl").mkdir()
    assert list(values([run], "/api/runs")[0]["files"]) == ["learner"]
    for asked in ("overview", "catalogue"):
        assert values([run], f"/api/runs/one/{asked}")
    assert answer([run], "/api/runs/one/series?file=replay&name=*")[0] == 404


ODD = {
    "not finite": "NaN",
    "too large": "1" + "0" * 400,
    "text": '"<b>"',
    "list": "[1]",
    "object": '{"a":1}',
    "nothing": "null",
    "truth": "true",
}
NAMES = ("step", "time", "dead", "failing", "idle", "reward/mean", "reward/min", "reward/max", "grad_norm")
MORE_NAMES = ("updates_skipped", "seconds/step", "groups/zero_variance", "learner_waited_for_labels_s")
ASKED = ("overview", "catalogue", "series?file=learner&name=*", "series?file=learner&name=*&from=0&to=2000")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [10, 2000])
@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_metrics_with_any_values_are_shown_as_far_as_they_are_numbers(tmp_path: Path, value: str, rows: int) -> None:
    run = make_run(tmp_path / "one")
    write_config(run)
    row = "{" + ",".join(f'"{name}":{value}' for name in (*NAMES, *MORE_NAMES)) + "}\n"
    for role in ("learner", "replay", "actor-0", "scoring-0"):
        (run / "metrics" / f"{role}.jsonl").write_text(row * rows)
    for asked in ASKED:
        assert answer([run], f"/api/runs/one/{asked}")[0] == 200
    assert len(values([run], "/api/table")["rows"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("file", ["processes.json", "summary.json", "config.yaml", "supervised"])
@pytest.mark.parametrize("content", ["[" * 10**5, '{"a": NaN}', '{"a": ', "[1]", '"x"', "a: [", '{"learner": 5}'])
def test_a_damaged_file_of_a_run_leaves_its_page(tmp_path: Path, file: str, content: str) -> None:
    run = make_run(tmp_path / "one")
    # The reader of YAML gives up long before, and takes seconds for more.
    (run / file).write_text(content[:1000] if file == "config.yaml" else content)
    assert values([run], "/api/runs")
    assert values([run], "/api/table")["rows"][0]["state"] == "stopped"
    assert values([run], "/api/runs/one/overview")["state"] == "stopped"


@pytest.mark.parametrize(
    "path",
    [f"episodes?limit={'9' * 5000}", f"episodes?offset={'9' * 5000}", f"episodes/{'9' * 5000}/x", "episodes/1/..%2fx"],
)
def test_an_address_that_names_nothing_is_refused_with_a_reason(tmp_path: Path, path: str) -> None:
    status, headers, body = answer([make_run(tmp_path / "one")], f"/api/runs/one/{path}")
    assert status == 400
    assert json.loads(body)["error"]
    assert "Content-Security-Policy" in headers


def test_a_fault_of_the_server_is_told_and_closed_to_other_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise ZeroDivisionError("nobody expects it")

    monkeypatch.setattr(server, "catalogue", fail)
    status, headers, body = answer([make_run(tmp_path / "one")], "/api/runs/one/catalogue")
    assert status == 500
    assert "nobody expects it" in json.loads(body)["error"]
    assert "Content-Security-Policy" in headers


@pytest.mark.slow
def test_a_configuration_is_parsed_again_only_where_it_has_changed(tmp_path: Path) -> None:
    write_config(tmp_path)
    run = Run(tmp_path)
    first = run.settings()
    assert first is not None
    assert run.settings() is first
    write_config(tmp_path, keys="elsewhere")
    changed = run.settings()
    assert changed is not None
    assert changed.keys == "elsewhere"
    (tmp_path / "config.yaml").unlink()
    assert run.settings() is None
