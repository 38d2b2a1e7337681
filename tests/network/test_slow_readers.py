"""Memory that who does not read can take from a server."""

from __future__ import annotations

from contextlib import closing

import zmq

from asyncrl.network.sockets import PEER_MESSAGES, listen

SIZE = 100_000
KERNEL_BYTES = 16 << 20
"""More than the buffers of a connection hold."""


def test_replies_to_who_does_not_read_are_refused_once_so_many_wait() -> None:
    with (
        zmq.Context() as context,
        closing(listen(context, "tcp://127.0.0.1:*", None, 1 << 20)) as listener,
        context.socket(zmq.DEALER) as sleeper,
    ):
        sleeper.linger = 0
        sleeper.rcvhwm = 1
        sleeper.connect(listener.endpoint)
        sleeper.send(b"hello")
        client, _ = listener.socket.recv_multipart()
        sent, refused = 0, False
        while not refused and sent < 10 * PEER_MESSAGES:
            try:
                listener.socket.send_multipart([client, bytes(SIZE)], zmq.NOBLOCK, copy=False)
                sent += 1
            except zmq.Again:
                refused = True
        assert refused
        assert sent * SIZE <= PEER_MESSAGES * SIZE + KERNEL_BYTES
