"""Listening sockets and their gate: who gets in, who is counted, and who is cut off."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncrl.errors import UnavailableError
from asyncrl.machine.ports import free_ports
from asyncrl.network.keys import add_client
from asyncrl.network.listener import PEER_MESSAGES, Listener, require_keys
from asyncrl.network.sockets import connect, send_within, try_send
from tests.helpers import GENEROUS_S, until
from tests.network.support import client_of, knock, made, peer, server_of, strangers

ANYWHERE = "tcp://127.0.0.1:*"
REPLY_BYTES = 100_000
KERNEL_BYTES = 16 << 20
"""More than the buffers of a connection hold."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return made(tmp_path / "keys")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def listener(context: zmq.Context[Any], keys: Path) -> Iterator[Listener]:
    listener = Listener(context, ANYWHERE, server_of(keys), 1 << 20)
    yield listener
    listener.close()


def received(listener: Listener, seconds: float = 10.0) -> bytes | None:
    """The last frame of the next message within so many seconds."""
    return listener.socket.recv_multipart()[-1] if listener.socket.poll(int(seconds * 1000)) else None


@pytest.mark.parametrize("who", ["no keys", "another server's key", "a key that is not in the list"])
def test_a_stranger_is_counted_and_not_heard_while_others_are_served(
    listener: Listener, keys: Path, tmp_path: Path, who: str
) -> None:
    with peer(listener.endpoint, strangers(keys, made(tmp_path / "others"))[who]) as stranger:
        knock(stranger, b"let me in")
        with peer(listener.endpoint, client_of(keys)) as client:
            client.send(b"hello")
            assert received(listener) == b"hello"
        if who == "no keys":  # its side ends the connection, and comes again only when asked to
            stranger.close()
        until(lambda: listener.failed_handshakes > 0)
    assert received(listener, 0.2) is None


NOISE = (b"\xff" * 2000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b"\0" * 100)
"""Without keys, ZeroMQ takes the others for messages of its first protocol."""


@pytest.mark.parametrize(("with_keys", "noises"), [(True, NOISE), (False, NOISE[:1])])
def test_noise_on_the_port_is_counted_and_harms_nobody(
    context: zmq.Context[Any], keys: Path, with_keys: bool, noises: tuple[bytes, ...]
) -> None:
    listener = Listener(context, ANYWHERE, server_of(keys) if with_keys else None, 1 << 20)
    port = int(listener.endpoint.rpartition(":")[2])
    for noise in noises:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(noise)
    until(lambda: listener.failed_handshakes > 0)
    with peer(listener.endpoint, client_of(keys) if with_keys else None) as client:
        client.send(b"hello")
        assert received(listener) == b"hello"
    listener.close()


def test_a_client_is_let_in_and_shut_out_by_its_line_without_a_restart(listener: Listener, keys: Path) -> None:
    theirs = client_of(add_client(keys, "gpu7"))
    with peer(listener.endpoint, theirs) as client:
        client.send(b"hello")
        identity, hello = listener.socket.recv_multipart()
        assert hello == b"hello"
        listener.socket.send_multipart([identity, b"welcome"])
        assert client.poll(1000 * GENEROUS_S)
        assert client.recv() == b"welcome"
    assert listener.failed_handshakes == 0
    allowed = keys / "allowed"
    allowed.write_text("".join(line for line in allowed.read_text().splitlines(True) if "gpu7" not in line))
    with peer(listener.endpoint, theirs) as client:
        knock(client, b"hello again")
        until(lambda: listener.failed_handshakes > 0)
    assert received(listener, 0.2) is None


def test_a_damaged_list_lets_nobody_new_in_and_says_so(
    listener: Listener, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (keys / "allowed").write_text("garbage")
    with peer(listener.endpoint, client_of(keys)) as client:
        knock(client, b"hello")
        until(lambda: "no client is accepted" in caplog.text)
    assert received(listener, 0.2) is None


def test_a_peer_that_sends_too_much_is_cut_off_and_the_others_go_on(listener: Listener, keys: Path) -> None:
    with peer(listener.endpoint, client_of(keys)) as client, peer(listener.endpoint, client_of(keys)) as flood:
        client.send(b"before")
        assert received(listener) == b"before"
        flood.send(b"x" * (1 << 21))
        flood.send(b"and this")
        client.send(b"after")
        assert received(listener) == b"after"
        assert received(listener, 0.3) in (None, b"and this")


@pytest.mark.slow
def test_a_socket_with_keys_and_no_gate_accepts_nobody(context: zmq.Context[Any], keys: Path) -> None:
    own = server_of(keys)
    with context.socket(zmq.ROUTER) as socket:
        require_keys(socket, own)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with peer(f"tcp://127.0.0.1:{port}", client_of(keys)) as client:
            knock(client, b"hello")
            assert not socket.poll(500)


def test_an_address_that_is_taken_is_an_error_that_leaves_nothing_behind(
    context: zmq.Context[Any], listener: Listener
) -> None:
    with pytest.raises(UnavailableError, match=f"cannot listen.*in use.*; process {os.getpid()} listens there: "):
        Listener(context, listener.endpoint, None, 1 << 20)
    with zmq.Context() as other, pytest.raises(UnavailableError, match="cannot listen"):
        Listener(other, listener.endpoint, None, 1 << 20)


def test_a_second_socket_with_keys_needs_a_context_of_its_own(
    context: zmq.Context[Any], listener: Listener, keys: Path
) -> None:
    with pytest.raises(UnavailableError, match="make another"):
        Listener(context, ANYWHERE, server_of(keys), 1 << 20)


def test_a_socket_with_keys_follows_a_closed_one_in_its_context_at_once(context: zmq.Context[Any], keys: Path) -> None:
    for _ in range(50):
        Listener(context, ANYWHERE, server_of(keys), 1 << 20).close()


def test_a_gate_ends_with_its_context(keys: Path) -> None:
    context, others = zmq.Context[Any](), set(threading.enumerate())
    listener = Listener(context, ANYWHERE, server_of(keys), 1 << 20)
    [gate] = set(threading.enumerate()) - others
    ending = threading.Thread(target=context.term)
    ending.start()
    gate.join(GENEROUS_S)
    assert not gate.is_alive()
    listener.socket.close()
    ending.join(GENEROUS_S)
    assert not ending.is_alive()


def test_a_client_waits_for_a_server_that_comes_later(keys: Path, context: zmq.Context[Any]) -> None:
    port = free_ports(1)
    with zmq.Context() as own, connect(own, f"tcp://127.0.0.1:{port}", client_of(keys)) as client:
        client.send(b"hello")
        listener = Listener(context, f"tcp://127.0.0.1:{port}", server_of(keys), 1 << 20)
        assert received(listener) == b"hello"
        listener.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", [pytest.param("another server's key", marks=pytest.mark.heavy), "a key that is not in the list"]
)
def test_a_send_over_a_connection_that_was_refused_waits_for_a_bounded_time(
    listener: Listener, keys: Path, tmp_path: Path, who: str
) -> None:
    refused = strangers(keys, made(tmp_path / "others"))[who]
    with peer(listener.endpoint, refused) as stranger:
        until(lambda: not try_send(stranger, [b"let me in"]))

    async def send_until_it_is_refused() -> None:
        with zmq.asyncio.Context() as own, connect(own, listener.endpoint, refused) as stranger:
            while True:
                await send_within(0.05, stranger, [b"let me in"])
                await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        asyncio.run(send_until_it_is_refused())


def test_a_reader_that_does_not_read_takes_a_bounded_amount_of_memory(context: zmq.Context[Any]) -> None:
    listener = Listener(context, ANYWHERE, None, 1 << 20)
    with context.socket(zmq.DEALER) as sleeper:
        sleeper.linger, sleeper.rcvhwm = 0, 1
        sleeper.connect(listener.endpoint)
        sleeper.send(b"hello")
        client, _ = listener.socket.recv_multipart()
        most = PEER_MESSAGES + KERNEL_BYTES // REPLY_BYTES
        with pytest.raises(zmq.Again):  # noqa: PT012 - any of them
            for _ in range(most + 1):
                listener.socket.send_multipart([client, bytes(REPLY_BYTES)], zmq.NOBLOCK, copy=False)
    listener.close()
