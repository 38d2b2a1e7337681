"""The facts about this host that the doctor gathers."""

from __future__ import annotations

from pathlib import Path

from asyncrl.launch.doctor.gathering import missing_to_compile


def test_a_compiler_is_found_where_triton_looks_for_one_and_headers_where_python_has_them(tmp_path: Path) -> None:
    headers, programs = tmp_path / "include", tmp_path / "bin"
    headers.mkdir()
    programs.mkdir()
    alone = {"PATH": str(programs)}
    assert list(missing_to_compile(alone, headers)) == ["C compiler", str(headers / "Python.h")]
    (headers / "Python.h").touch()
    assert list(missing_to_compile(alone, headers)) == ["C compiler"]
    assert list(missing_to_compile({**alone, "CC": "cc"}, headers)) == []
    (programs / "clang").touch(mode=0o755)
    assert list(missing_to_compile(alone, headers)) == []
