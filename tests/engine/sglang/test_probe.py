"""The check that a Python has SGLang: it is quick, and refuses only a Python that certainly has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.engine.sglang.probe import installed_version, without_sglang
from tests.engine.sglang.pythons import PACKAGES, python_with, script
from tests.helpers import GENEROUS_S

SERVER = ("sglang/__init__.py", "sglang/launch_server.py")


def test_a_python_with_sglang_is_believed_without_an_import_of_it(tmp_path: Path) -> None:
    assert without_sglang(python_with(tmp_path, "python", *SERVER), {}) == ""


def test_the_environment_of_servers_counts(tmp_path: Path) -> None:
    python_with(tmp_path, "other", *SERVER)
    bare = script(tmp_path / "bare", f'exec {sys.executable} -S "$@"')
    assert without_sglang(bare, {"PYTHONPATH": str(tmp_path / PACKAGES)}) == ""
    assert without_sglang(bare, {"PYTHONPATH": ""}) == "it has no package sglang"


def test_a_folder_called_sglang_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as SGLang's repository, which was cloned into the working folder."""
    (tmp_path / "sglang" / "python").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert without_sglang(python_with(tmp_path, "python"), {}) == "it has no package sglang"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('exec /nowhere/python3 "$@" 2>/dev/null', "it ended with status 127"),
        ("echo Fatal Python error >&2; echo >&2; exit 1", "Fatal Python error"),
    ],
)
def test_a_program_that_does_not_run_is_explained(tmp_path: Path, line: str, reason: str) -> None:
    assert without_sglang(script(tmp_path / "python", line), {}) == reason


def test_a_file_that_is_no_program_is_explained(tmp_path: Path) -> None:
    assert without_sglang(str(tmp_path / "missing"), {}) == "there is no such program"
    (tmp_path / "text").write_bytes(b"\0")
    (tmp_path / "text").chmod(0o755)
    assert without_sglang(str(tmp_path / "text"), {}).startswith("OSError: [Errno 8] Exec format error")


def test_a_program_that_says_nothing_or_is_late_is_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert without_sglang(script(tmp_path / "mute", "exit 0"), {}) == ""
    assert caplog.messages == []
    late = script(tmp_path / "late", f"sleep {GENEROUS_S * 10}; exit 1")
    assert without_sglang(late, {}, timeout_s=0.05) == ""
    assert caplog.messages == [
        f"engine.python={late}: it has not ended within 0.05 s, so it is unknown whether it has SGLang"
    ]


def test_the_version_is_found_without_an_import_of_sglang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python = python_with(tmp_path, "python", *SERVER)
    metadata = tmp_path / PACKAGES / "sglang-0.5.17.post1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17.post1\n")
    assert installed_version(python, {}) == (0, 5, 17)
    assert caplog.messages == []
    (bare := tmp_path / "bare").mkdir()
    other = python_with(bare, "python", *SERVER)
    assert installed_version(other, {}) == ()
    assert "the version of SGLang is unknown" in caplog.text
