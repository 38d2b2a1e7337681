"""The doctor on this host: what it gathers, and the command."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.schema import ClusterConfig, NetworkConfig, TrainConfig
from asyncrl.launch.doctor.doctor import main
from asyncrl.launch.doctor.facts import LauncherFact
from asyncrl.launch.doctor.launching import launcher_facts
from asyncrl.launch.doctor.sharing import address_facts, key_facts, share, since_start_s
from asyncrl.launch.ownership import exclusively
from asyncrl.network.keys import add_client, make_keys
from tests.helpers import status_of


def test_hosts_see_each_others_marks_in_a_shared_folder(tmp_path: Path) -> None:
    alone = share(tmp_path, "one", {"torch": "1"}, "key of one")
    second = share(tmp_path, "two", {"torch": "2"}, "key of two")
    assert [mark.host for mark in alone.marks] == ["one"]
    assert [(mark.host, mark.versions, mark.server_key) for mark in second.marks] == [
        ("two", {"torch": "2"}, "key of two"),
        ("one", {"torch": "1"}, "key of one"),
    ]
    assert all(mark.skew_s is not None and abs(mark.skew_s) < 1 for mark in second.marks)
    assert second.free > 0
    two_days_ago = (tmp_path / ".doctor" / "two.json").stat().st_mtime - 2 * 86400
    os.utime(tmp_path / ".doctor" / "one.json", (two_days_ago, two_days_ago))
    assert [mark.host for mark in share(tmp_path, "two", {}, "").marks] == ["two"]


def test_a_mark_of_another_version_shows_that_the_folder_is_shared_and_tells_no_time(tmp_path: Path) -> None:
    share(tmp_path, "one", {}, "")
    (tmp_path / ".doctor" / "one.json").write_text('{"host": "one", "from_a_later_version": 1}')
    assert [(mark.host, mark.skew_s) for mark in share(tmp_path, "two", {}, "").marks[1:]] == [("one", None)]


def test_a_folder_that_cannot_be_written_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in share(tmp_path / "file", "one", {}, "").error


def test_keys_are_judged_as_a_run_would_use_them(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    theirs = add_client(folder, "other")
    network = NetworkConfig(keys=str(folder))
    own, server = key_facts(network)
    assert own is not None
    assert (own.errors, own.is_allowed) == ([], True)
    other, same = key_facts(NetworkConfig(keys=str(theirs)))
    assert other is not None
    assert (other.errors, other.is_allowed, same) == ([], None, server)
    (folder / "allowed").write_text("")
    assert key_facts(network)[0].is_allowed is False  # type: ignore[union-attr]
    (folder / "client.secret").chmod(0o644)
    assert "chmod 600" in key_facts(network)[0].errors[0]  # type: ignore[union-attr]
    assert key_facts(NetworkConfig()) == (None, "")


def test_own_ports_must_be_free_before_a_run_and_answer_while_it_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        network = NetworkConfig(replay_port=server.getsockname()[1], weights_port=0)
        (before,) = address_facts(network, 1, None)
        (during,) = address_facts(network, 1, 600.0)
        assert before.is_here
        assert "in use" in before.error
        assert (during.is_here, during.error) == (False, "")
    (after,) = address_facts(network, 1, 600.0)
    assert "refused" in after.error


def test_what_the_launcher_needs_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = ["sh", "-c", 'test {host} = a || { echo "no route to {host}" >&2; exit 255; }']
    found = launcher_facts(ClusterConfig(launcher="hosts", hosts=["a", "b"], shell=shell))
    assert found == [LauncherFact("a shell on a"), LauncherFact("a shell on b", "no route to b")]
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "srun").touch(0o755)
    slurm = {each.needs: bool(each.error) for each in launcher_facts(ClusterConfig(launcher="slurm"))}
    assert slurm == {"sbatch": True, "srun": False, "scontrol": True}
    monkeypatch.setitem(sys.modules, "ray", None)
    (ray,) = launcher_facts(ClusterConfig(launcher="ray"))
    assert "pip install 'asyncrl[ray]'" in ray.error
    assert launcher_facts(ClusterConfig()) == []


def test_a_run_is_starting_for_as_long_as_it_has_an_owner(tmp_path: Path) -> None:
    assert since_start_s(tmp_path / "run") is None
    with exclusively(tmp_path / "run"):
        seconds = since_start_s(tmp_path / "run")
        assert seconds is not None
        assert seconds < 60


@pytest.mark.slow
def test_the_command_examines_this_host_and_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig()
    config.model.path, config.data.train = "x", ["x"]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        config.network.replay_port, config.network.weights_port = server.getsockname()[1], 0
        (tmp_path / "runs" / "mine" / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
        status, found = call(["mine", "--json"], monkeypatch, capsys)
    problems = [each["text"] for each in found if each["verdict"] == "problem"]
    assert status == 1
    assert f"cannot listen at network.replay_port 127.0.0.1:{config.network.replay_port}" in problems[-1]
    checks = {each["check"] for each in found}
    assert {"gpus", "open files", "shared memory", "ports", "folder", "disk", "clock", "keys", "packages"} <= checks
    assert len(list((tmp_path / "runs" / ".doctor").glob("*.json"))) == 1
    assert call(["nothing"], monkeypatch, capsys)[0] == 2


@pytest.mark.slow
def test_a_python_for_servers_is_tried_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _python_with_sglang(tmp_path / "with", "print('loading', end=' '); atexit.register(print, 'goodbye')", "0.5.23")
    _python_with_sglang(tmp_path / "old", r"sys.stdout.buffer.write(b'\xff\n')", "0.5.17")
    _python_with_sglang(tmp_path / "without", r"sys.stderr.buffer.write(b'\xff\n'); sys.exit('No GPU')", "")
    (tmp_path / "mute").write_text("#!/bin/sh\n")
    (tmp_path / "mute").chmod(0o755)
    for python, verdict, says in (
        ("./with", "ok", "./with has SGLang 0.5.23"),
        (
            "./old",
            "ok",
            "./old has SGLang 0.5.17; before 0.5.22, each push of new weights interrupts its requests",
        ),
        ("./without", "problem", "./without: No GPU"),
        ("./mute", "problem", "./mute: it did not print the version of SGLang, as a Python would"),
        ("./missing", "problem", "./missing: there is no such program"),
    ):
        found = call(["--python", python, "--json"], monkeypatch, capsys)[1]
        assert [(each["verdict"], each["text"]) for each in found if each["check"] == "servers"] == [(verdict, says)]


def _python_with_sglang(program: Path, prints: str, version: str) -> None:
    """A Python whose sglang does `prints` while it is imported."""
    package = program.with_suffix(".packages")
    package.mkdir()
    (package / "sglang.py").write_text(f"import atexit, sys\n{prints}\n__version__ = {version!r}\n")
    program.write_text(f'#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pyton", "X"], "unrecognized arguments: --pyton; did you mean --python?"),
        (["--fodler=x"], "unrecognized arguments: --fodler=x; did you mean --folder?"),
        (["a", "b"], "unrecognized arguments: b\n"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert says in capsys.readouterr().err


def test_a_python_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--python="])
    assert "--python: it is empty: name a Python" in capsys.readouterr().err


@pytest.mark.slow
def test_lines_for_a_pipe_are_as_long_as_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--python", "m" * 200]) == 1
    assert f"{'m' * 200}: there is no such program\n" in re.sub(" +\n", "\n", capsys.readouterr().out)


def call(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    """The status of the command, and its diagnoses."""
    status = status_of("doctor", *words)
    output = capsys.readouterr().out
    return status, json.loads(output)["diagnoses"] if output else []
