"""The user's modules are imported in a child process first, whose end is told with the file and the line."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from asyncrl.errors import StoppedError
from asyncrl.launch.preflight.importing import NamedCode, refused_imports
from tests.helpers import GENEROUS_S

MODULES = {
    "imports_well": "def score(): ...\n",
    "imports_ends": "import os\nos._exit(0)\n",
    "imports_crashes": "import ctypes\nctypes.string_at(0)\n",
    "imports_leaves": "import sys\nsys.exit('no data')\n",
    "imports_endlessly": "while True:\n    pass\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def of(*names: str) -> list[NamedCode]:
    return [NamedCode(f"scoring.rule={name}.score", f"{name}.score") for name in names]


@pytest.mark.slow
def test_modules_that_end_their_process_are_named_with_their_line_and_are_not_imported_here(folder: Path) -> None:
    ended, crashed, left = refused_imports(
        of("imports_well", "imports_ends", "imports_ends", "imports_crashes", "imports_leaves"), limit_s=GENEROUS_S
    )
    begin, at = "scoring.rule=imports_{}.score cannot be imported", f"({folder}/imports_{{}}.py, line 2)"
    end = f"{begin}: the module ended its process {{}} {at} when it was imported: move it into a function"
    assert ended.startswith(end.format("ends", "with status 0", "ends"))
    assert crashed.startswith(end.format("crashes", "by SIGSEGV", "crashes"))
    assert left.startswith(f"{begin} (SystemExit: no data {at}): move it".format("leaves", "leaves"))
    assert not MODULES.keys() & sys.modules.keys()


@pytest.mark.slow
def test_an_import_that_never_ends_is_ended_after_the_limit_and_its_line_is_named(folder: Path) -> None:
    [said] = refused_imports(of("imports_endlessly"), limit_s=1.0)
    assert "did not end within 1 s" in said
    assert f"(at {folder}/imports_endlessly.py, line " in said


@pytest.mark.slow
def test_a_stop_ends_an_import(folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        refused_imports(of("imports_endlessly"), stop, GENEROUS_S)


def test_modules_that_this_process_has_need_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.preflight.importing.JudgePool", None)
    missing = f"{__name__}.nothing"
    named = [NamedCode(f"scoring.rule={path}", path) for path in (f"{__name__}.of", missing, "no_such_module.score")]
    lines = refused_imports(named)
    assert [line.partition(" cannot")[0] for line in lines] == [
        f"scoring.rule={missing}",
        "scoring.rule=no_such_module.score",
    ]
