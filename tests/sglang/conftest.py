"""The real SGLang, where ASYNCRL_SGLANG_PYTHON names a Python that has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.support import RealServer, save_policy

VARIABLE = "ASYNCRL_SGLANG_PYTHON"
LIMIT_S = 900
"""A server takes 15 s to start on two quiet cores, and minutes on busy ones."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"needs a real SGLang: set {VARIABLE} to a Python that has it")
    for item in items:
        if "tests/sglang/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
            if VARIABLE not in os.environ:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all that leave it as it is."""
    server = RealServer(model, tmp_path_factory.mktemp("logs") / "server.log")
    yield server
    server.kill()
