"""The real vLLM, where ASYNCRL_VLLM_PYTHON names a Python that has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actor.engine.real import skip_without
from tests.vllm.support import RealServer, save_policy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without("ASYNCRL_VLLM_PYTHON", "vLLM", "tests/vllm/", items)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all; who kills it starts it again."""
    model = save_policy(tmp_path_factory.mktemp("policy"))
    server = RealServer(model, tmp_path_factory.mktemp("logs") / "server.log", "--enable-scale-out")
    yield server
    server.kill()
