"""The check of plain English reads prose and leaves code and the data of tests alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import plain_english
from tests.plain_english import CHECKED, ROOT, faults_of, main

LONG = "one two three four five six seven eight nine ten " * 4


def reasons(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [fault.reason for fault in faults_of(path)]


@pytest.mark.parametrize("pattern", CHECKED)
def test_every_pattern_of_what_is_checked_has_files(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


def test_without_a_path_all_code_and_the_pages_for_users_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "page.md").write_text("It was made anew.\n")
    for folder in ("asyncrl/part", "tests/part", "examples", "benchmarks/studies"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text('"""Whatever it is."""\n')
        (tmp_path / folder / "page.md").write_text("It was made anew.\n")
    (tmp_path / "CHANGELOG.md").write_text("* It was made anew.\n")
    assert main([])
    found = {line.split(":")[0].removeprefix(f"{tmp_path}/") for line in capsys.readouterr().out.splitlines()}
    assert found == {
        *("asyncrl/part/file.py", "asyncrl/part/page.md", "tests/part/file.py", "examples/file.py"),
        *("benchmarks/studies/file.py", "CHANGELOG.md"),
    }


def test_an_indented_block_of_a_docstring_is_code_and_the_prose_around_it_is_not(tmp_path: Path) -> None:
    text = f'"""A command.\n\n    python -m command {LONG}\n    --more\n\n{{prose}}.\n"""\n'
    assert reasons(tmp_path / "file.py", text.format(prose="It prints a line")) == []
    (reason,) = reasons(tmp_path / "file.py", text.format(prose=LONG.strip()))
    assert "a sentence of 40 words" in reason
    function = f'def f():\n    """A function.\n\n    {LONG.strip()}.\n    """\n'
    assert len(reasons(tmp_path / "file.py", function)) == 1


def test_texts_are_checked_where_they_are_shown_and_not_where_a_test_compares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'TEXT = "the file is gone for good"\n'
    assert len(reasons(tmp_path / "file.py", code)) == 1
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    assert reasons(tmp_path / "tests" / "file.py", code) == []
    assert len(reasons(tmp_path / "tests" / "file.py", f"# It stands here.\n{code}")) == 1
