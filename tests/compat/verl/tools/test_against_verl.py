"""Our classes of tools compared with verl's own, where ASYNCRL_VERL_PYTHON names a Python that has verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from tests.compat.verl.tools import program


def ran(*command: str) -> dict[str, Any]:
    """Run the program. Returns the outcome of each step. Tools print, so the outcomes are the last line."""
    environment = {**os.environ, "PYTHONPATH": str(Path(asyncrl.__file__).parents[1])}
    done = subprocess.run([*command], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_program_runs_on_our_classes(tmp_path: Path) -> None:
    ours = ran(sys.executable, program.__file__, "ours", str(tmp_path))
    assert ours["registry"] == ["list", "judge", "own", "renamed", "said", "shout"]
    assert ours["one name twice"] == {"raises": "ValueError"}
    assert ours["a file"] == ["list", "judge", "shout"]


@pytest.mark.slow
@pytest.mark.skipif(
    "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
)
def test_our_classes_of_tools_do_what_verls_do(tmp_path: Path) -> None:
    ours = ran(sys.executable, program.__file__, "ours", str(tmp_path))
    theirs = ran(os.environ["ASYNCRL_VERL_PYTHON"], program.__file__, "theirs", str(tmp_path))
    assert ours.keys() == theirs.keys()
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == {}
