"""The settings and fixtures of all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers import GENEROUS_S

# A busy machine is no defect: nothing here is judged by the time that it takes.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")


# The garbage collector need not look through the modules of torch and transformers again and again: neither while they
# are imported, which takes a quarter of that time, nor later.
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _handlers_of_the_log() -> Iterator[None]:
    """A command that runs within a test or a fixture gives the root logger a handler. It would write to a stream that
    is closed by the time of the next test."""
    root = logging.getLogger()
    _leave_handlers_of_pytest(root)
    level = root.level
    yield
    _leave_handlers_of_pytest(root)
    root.setLevel(level)


def _leave_handlers_of_pytest(root: logging.Logger) -> None:
    root.handlers[:] = [handler for handler in root.handlers if type(handler).__module__ == "_pytest.logging"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines have an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), GENEROUS_S))
    return True
