"""The real SGLang, where ASYNCRL_SGLANG_PYTHON names a Python that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.real import needs, save_policy
from tests.sglang.support import RealServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in needs("SGLang", "ASYNCRL_SGLANG_PYTHON"):
                item.add_marker(mark)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all that leave it as it is."""
    server = RealServer(model, tmp_path_factory.mktemp("logs") / "server.log")
    yield server
    server.kill()
