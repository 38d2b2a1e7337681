"""Tests that are coroutines have an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.helpers import GENEROUS_S


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), GENEROUS_S))
    return True
