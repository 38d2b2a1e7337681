from __future__ import annotations

from pathlib import Path

import pytest

from tests.repeated import cpu_sets, main

FAILS_ONCE = """
from pathlib import Path

def test_that_fails_once():
    with (Path(__file__).parent / "count").open("a+") as file:
        file.write("x")
        assert file.tell() != 2
"""


def test_a_test_that_fails_by_chance_is_named_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    with pytest.raises(SystemExit) as ended:
        main(["--runs", "3", "--at-once", "1", "--", "-p", "no:xdist", "test_it.py"])
    *_, failed, clean = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert failed == "failed in 1 of 3 runs (2): test_it.py::test_that_fails_once"
    assert clean.startswith("2 of 3 runs were clean.")


def test_the_cpus_of_a_run_are_a_set_of_their_own() -> None:
    assert cpu_sets(range(5), 2) == [range(2), range(2, 4)]
    assert cpu_sets([3], 2) == [[3]]
