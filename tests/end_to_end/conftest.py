"""Runs that are stopped when their test ends, and the demo's parts, prepared once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.demo.command import CACHE, SEED, prepared_overrides
from asyncrl.demo.prepare import prepare
from tests.end_to_end.support import ROOT, Run

LONGEST_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs take minutes, and share the machine with whatever else is tested."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture(scope="session")
def prepared() -> list[str]:
    """The command line that trains on the demo's task."""
    return prepared_overrides(prepare(ROOT / CACHE, SEED, lambda _: None))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `asyncrl COMMAND KEY=VALUE ...` in a run folder of the test's own."""
    with ExitStack() as runs:
        yield lambda command, *overrides: runs.enter_context(Run(command, tmp_path, *overrides))
