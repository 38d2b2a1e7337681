"""The real SGLang, where ASYNCRL_SGLANG_PYTHON names a Python that has it."""

from __future__ import annotations

import os

import pytest

VARIABLE = "ASYNCRL_SGLANG_PYTHON"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if VARIABLE not in os.environ:
        skip = pytest.mark.skip(reason=f"needs a real SGLang: set {VARIABLE} to a Python that has it")
        for item in items:
            if "tests/sglang/" in item.nodeid:
                item.add_marker(skip)
