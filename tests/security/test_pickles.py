"""A pickle may run any code, so nothing that arrives from a socket or is in a store is unpickled."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import asyncrl
from asyncrl.errors import StoreError, WireError
from asyncrl.replay.store.store import Store
from asyncrl.wire import PROTOCOL, decode

PACKAGE = Path(asyncrl.__file__).parent
LOADERS = ("pickle.load", "pickle.loads", "torch.load", "np.load", "cloudpickle.load", "cloudpickle.loads")
OF_OBJECTS = (
    *("recv_pyobj", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""Methods of ZeroMQ and torch.distributed that unpickle what arrives."""
OWN = {"compat/verl/rewards/processes.py", "compat/verl/controller/group.py"}
"""Files that unpickle bytes of the same user: a call for a child process, and an error that they have pickled."""

loaded: list[str] = []


def run_by_a_pickle(where: str) -> None:
    loaded.append(where)


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return run_by_a_pickle, ("here",)


@pytest.fixture
def harmful() -> Iterator[bytes]:
    """A pickle that runs a function when it is loaded."""
    data = pickle.dumps(Harmful())
    pickle.loads(data)  # noqa: S301 - it must work, so that the tests mean something
    assert loaded == ["here"]
    loaded.clear()
    yield data
    assert not loaded


def header(body: Any, *arrays: Any) -> bytes:
    return bytes(msgpack.packb([PROTOCOL, "put", 0, body, list(arrays)]))


def test_a_pickle_in_place_of_a_header_or_of_a_body_is_refused(harmful: bytes) -> None:
    with pytest.raises(WireError):
        decode([harmful])
    with pytest.raises(WireError):
        _ = decode([header(harmful)]).body


def test_a_pickle_within_a_body_stays_bytes(harmful: bytes) -> None:
    assert decode([header({"reason": harmful})]).body == {"reason": harmful}


def test_an_array_of_objects_is_refused(harmful: bytes) -> None:
    with pytest.raises(WireError):
        decode([header({}, ["tokens", "|O", [1]]), harmful])


def test_a_pickle_in_a_store_is_damage(harmful: bytes, tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 24, durable=False)
    with store.transaction() as tx:
        tx.put_bytes("trajectories", "a", harmful)
        with pytest.raises(StoreError, match="trajectories of b'a'"):
            tx.get("trajectories", "a", dict)
    store.close()


def test_only_two_files_unpickle_whatever_a_pickle_names() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") for _ in unpickling(path)}
    assert found == OWN


def unpickling(path: Path) -> Iterator[ast.Call]:
    """The calls in a file that load pickles without limits."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            limits = {each.arg: ast.unparse(each.value) for each in node.keywords}
            is_limited = limits.get("weights_only") == "True" or limits.get("allow_pickle") == "False"
            name = ast.unparse(node.func)
            if node.func.attr in OF_OBJECTS or (name in LOADERS and not is_limited):
                yield node
