"""TensorDicts, gathering and colocated workers compared with verl's own, if ASYNCRL_VERL_PYTHON names a Python that has
verl. Ours run in that Python too, since they need packages that verl brings."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.compat.verl import in_one_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]


def answers(library: str, call: str, store: Path, ranks: int = 1) -> Sequence[Any]:
    """Return the result of the call on each rank."""
    program = [os.environ["ASYNCRL_VERL_PYTHON"], str(Path(in_one_process.__file__)), library, call]
    processes = [
        subprocess.Popen([*program, str(rank), str(store)], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    found = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(each.splitlines()[-1]) for each in found]


@pytest.mark.parametrize(("call", "ranks"), [("through_tensordict", 1), ("gathered", 2), ("colocated", 1)])
def test_the_outcome_is_that_of_verl(tmp_path: Path, call: str, ranks: int) -> None:
    theirs, ours = (answers(library, call, tmp_path / library, ranks) for library in ("verl", "ours"))
    assert ours == theirs
