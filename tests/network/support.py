"""Keys of a run, of other runs and of no run, and a peer that speaks to a socket as a stranger would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from asyncrl.network.keys import ClientKeys, ServerKeys, client_keys, make_keys, server_keys
from asyncrl.network.sockets import connect, try_send


def server_of(folder: Path) -> ServerKeys:
    keys = server_keys(str(folder))
    assert keys is not None
    return keys


def client_of(folder: Path) -> ClientKeys:
    keys = client_keys(str(folder))
    assert keys is not None
    return keys


def made(folder: Path) -> Path:
    make_keys(folder)
    return folder


def strangers(ours: Path, others: Path) -> dict[str, ClientKeys | None]:
    """Everyone who must get nothing from the server of `ours`; `others` are the keys of another run."""
    _, unknown = zmq.curve_keypair()
    return {
        "no keys": None,
        "another server's key": ClientKeys(client_of(ours).secret, client_of(others).server),
        "a key that is not in the list": ClientKeys(unknown, client_of(ours).server),
        "the keys of another run": client_of(others),
    }


@contextmanager
def peer(endpoint: str, keys: ClientKeys | None) -> Iterator[zmq.Socket[Any]]:
    """A connection with a context of its own."""
    with zmq.Context() as context, connect(context, endpoint, keys) as socket:
        yield socket


def knock(socket: zmq.Socket[Any], message: bytes) -> None:
    """Send as a client that may be refused."""
    try_send(socket, [message])
