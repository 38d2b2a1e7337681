"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect

import pytest
from hypothesis import settings

from tests.helpers import GENEROUS_S

# A busy machine is no defect: nothing here is judged by the time that it takes.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")


def pytest_collection_finish() -> None:
    """The garbage collector need not look through the modules of torch and transformers again and again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines have an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), GENEROUS_S))
    return True
