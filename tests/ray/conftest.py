"""A Ray cluster of four nodes on this machine, each with a loopback address of its own. Without Ray all is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'asyncrl[ray]'")

from tests.ray.support import Nodes


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    # Starting it takes half a minute; a test that kills a node brings it back.
    with Nodes() as nodes:
        yield nodes
