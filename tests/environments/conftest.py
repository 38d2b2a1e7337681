"""Tests with the real packages of others, each in a Python of its own (make test-environments)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments.pythons import reason_or_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.environments)


@pytest.fixture(scope="session")
def python_with() -> Callable[[str], Path]:
    """Gives the Python that has the packages of this name, or skips the test with the reason why there is none."""

    def python(name: str) -> Path:
        found = reason_or_python(name)
        if isinstance(found, str):
            pytest.skip(f"{name} could not be installed: {found}")
        return found

    return python
