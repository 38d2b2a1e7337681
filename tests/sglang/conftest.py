"""The real SGLang, where ASYNCRL_SGLANG_PYTHON names a Python that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.engine.real import save_policy, skip_without
from tests.sglang.support import RealServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without("ASYNCRL_SGLANG_PYTHON", "SGLang", "tests/sglang/", items)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all that leave it as it is."""
    server = RealServer(model, tmp_path_factory.mktemp("logs") / "server.log")
    yield server
    server.kill()
