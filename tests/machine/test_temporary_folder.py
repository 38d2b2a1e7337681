"""Folders of killed processes are removed, and no other folders."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.machine.temporary_folder import LOCK, temporary_folder

PREFIX = "asyncrl-test-"
HOLDING = """
import sys, tempfile
from asyncrl.machine.temporary_folder import temporary_folder
tempfile.tempdir = sys.argv[1]
with temporary_folder("asyncrl-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_at_the_end_even_after_an_error(parent: Path) -> None:
    def fail() -> None:
        with temporary_folder(PREFIX) as folder:
            assert folder.parent == parent
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(parent.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_and_that_of_a_living_one_stays(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        with temporary_folder(PREFIX):
            assert (left / "file").exists()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert left.exists()
    with temporary_folder(PREFIX) as folder:
        assert [*parent.iterdir()] == [folder]


def test_folders_of_other_kinds_and_without_a_lock_stay(parent: Path) -> None:
    for name in ("asyncrl-other-1", f"{PREFIX}new", "elsewhere"):
        (parent / name).mkdir()
    (parent / "asyncrl-other-1" / LOCK).touch()
    (parent / "elsewhere" / LOCK).touch()
    (parent / f"{PREFIX}link").symlink_to(parent / "elsewhere")
    with temporary_folder(PREFIX):
        pass
    assert {each.name for each in parent.iterdir()} == {
        "asyncrl-other-1",
        "elsewhere",
        f"{PREFIX}link",
        f"{PREFIX}new",
    }
    assert (parent / "elsewhere" / LOCK).exists()
