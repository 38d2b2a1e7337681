"""A remote folder is copied to a host once, whole or not at all, even if processes are killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from asyncrl.errors import ConfigError
from asyncrl.machine.remote_folder import is_url, known_copy, local_copy, read_remote
from tests.helpers import until

pytestmark = pytest.mark.slow

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096, "deep/code.py": b"x = 1\n"}
URL = "memory://models/tiny"


@pytest.fixture
def store() -> Any:
    """A store with the folder `URL`."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, content in FILES.items():
        system.pipe_file(f"/models/tiny/{name}", content)
    yield system
    system.store.clear()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are copied from the store."""
    names: list[str] = []
    get_file = MemoryFileSystem.get_file

    def noting(self: Any, source: str, *arguments: Any, **options: Any) -> Any:
        names.append(Path(source).name)
        return get_file(self, source, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", noting)
    return names


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_only_what_has_a_scheme_is_a_url() -> None:
    assert all(map(is_url, ("s3://bucket/model", "gs://a", "hdfs://host/a", "memory://a", "file:///a")))
    assert not any(map(is_url, ("Qwen/Qwen3-0.6B", "/models/a", "./a:b", "a//b", "C:/a")))


def test_a_copy_has_every_file_and_is_made_once(store: Any, copied: list[str], tmp_path: Path) -> None:
    copy = local_copy(URL, str(tmp_path))
    assert contents(copy) == FILES
    assert local_copy(f"{URL}/", str(tmp_path)) == copy == known_copy(URL, str(tmp_path))
    assert len(copied) == len(FILES)


def test_what_changes_in_the_store_is_copied_anew_and_readers_of_the_old_copy_keep_it(
    store: Any, tmp_path: Path
) -> None:
    old = local_copy(URL, str(tmp_path))
    store.pipe_file("/models/tiny/config.json", b"{1}")
    new = local_copy(URL, str(tmp_path))
    assert contents(new) == {**FILES, "config.json": b"{1}"}
    assert contents(old) == FILES
    assert known_copy(URL, str(tmp_path)) == new


def test_a_file_that_comes_short_makes_no_copy(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: Any, source: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(self.cat_file(source)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "get_file", short)
    with pytest.raises(ConfigError, match="bytes instead of"):
        local_copy(URL, str(tmp_path))
    assert known_copy(URL, str(tmp_path)) is None
    monkeypatch.undo()
    assert contents(local_copy(URL, str(tmp_path))) == FILES


def test_a_folder_that_changes_while_it_is_copied_is_copied_as_it_is_in_the_end(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file, changes = MemoryFileSystem.get_file, [b"{later}"]

    def changing(self: Any, source: str, *arguments: Any, **options: Any) -> None:
        get_file(self, source, *arguments, **options)
        if changes:
            self.pipe_file("/models/tiny/config.json", changes.pop())

    monkeypatch.setattr(MemoryFileSystem, "get_file", changing)
    assert contents(local_copy(URL, str(tmp_path))) == {**FILES, "config.json": b"{later}"}


def test_without_the_store_the_copy_is_used_and_without_a_copy_the_url_is_refused(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = local_copy(URL, str(tmp_path / "here"))

    def away(*_: Any, **__: Any) -> None:
        raise OSError("no route to the store")

    monkeypatch.setattr(MemoryFileSystem, "find", away)
    assert local_copy(URL, str(tmp_path / "here")) == copy
    assert "no route to the store" in caplog.text
    with pytest.raises(ConfigError, match="no route to the store"):
        local_copy(URL, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://models/nothing", r"nothing cannot be read|no files"),
        ("unheard-of://bucket", "Protocol not known"),
        ("s3://bucket/model", "s3fs"),
    ],
)
def test_a_url_that_names_nothing_is_refused_with_the_reason(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        local_copy(url, str(tmp_path))


def test_a_store_cannot_have_files_written_elsewhere(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = MemoryFileSystem.find
    for listed in ("/models/tiny/../../../x", "/models/tiny/deep/../../x", "/etc/x", "/models/tiny2/x"):
        more = {listed: {"size": 1, "type": "file"}}
        monkeypatch.setattr(MemoryFileSystem, "find", lambda *a, more=more, **k: {**find(*a, **k), **more})
        with pytest.raises(ConfigError, match="outside of it"):
            local_copy(URL, str(tmp_path))
    assert contents(tmp_path) == {}


def test_empty_files_in_the_place_of_folders_are_not_copied(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = MemoryFileSystem.find
    marks = {f"/models/tiny/{name}": {"size": 0, "type": "file"} for name in ("", "deep/")}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *a, **k: {**find(*a, **k), **marks})
    assert contents(local_copy(URL, str(tmp_path))) == FILES


def test_a_url_of_one_file_is_refused(store: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is a file: name the folder"):
        local_copy(f"{URL}/config.json", str(tmp_path))


def test_one_file_is_read_without_a_copy(store: Any, tmp_path: Path) -> None:
    assert read_remote(f"{URL}/config.json") == "{}"
    with pytest.raises(OSError, match="absent"):
        read_remote(f"{URL}/absent")


COPIER = """
import sys, time
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from asyncrl.machine.remote_folder import local_copy
get_file, (url, place, log, hang) = LocalFileSystem.get_file, sys.argv[1:]
def slow(self, source, target, **options):
    with open(log, "a") as file:
        file.write(Path(source).name + "\\n")
    if Path(source).name == hang:
        Path(target).write_bytes(b"the beginning")
        Path(log + ".hung").touch()
        time.sleep(600)
    get_file(self, source, target, **options)
LocalFileSystem.get_file = slow
print(local_copy(url, place))
"""


def start(source: Path, place: Path, log: Path, hang: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COPIER, f"file://{source}", str(place), str(log), hang]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_two_processes_that_need_a_folder_at_once_copy_it_once(source: Path, tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "place"
    answers = [each.communicate()[0] for each in [start(source, place, log) for _ in range(2)]]
    assert answers[0] == answers[1]
    assert sorted(log.read_text().split()) == sorted(Path(name).name for name in FILES)


def test_a_copy_that_is_killed_in_the_middle_is_finished_by_the_next_process(source: Path, tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "place"
    killed = start(source, place, log, hang="model.safetensors")
    until(lambda: Path(f"{log}.hung").exists())
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    url = f"file://{source}"
    assert known_copy(url, str(place)) is None
    log.unlink()
    answer, _ = start(source, place, log).communicate()
    assert contents(Path(answer.strip())) == FILES
    assert log.read_text().split() == ["model.safetensors"], "what was whole is not copied again"
    assert LocalFileSystem().exists(answer.strip())
