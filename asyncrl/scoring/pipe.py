"""The pipe between the scorer and a process that runs users' code.

Users' code may stop its process in the middle of a message, or write into the pipe itself. So the scorer's deadline
holds for the whole message, even if a part of it has arrived.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Callable

from asyncrl.errors import WireError

WATCH_S = 0.1
"""The seconds between two looks at the other process during a wait."""
MOST_BYTES = 1 << 32
"""The longest message."""

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


class TimedPipe:
    """One end of the pipe. It takes over the socket `end`.

    `look` is called every WATCH_S seconds of a wait. It returns true if the other process has ended. An error that it
    raises ends the wait. Without `look`, waits have no limit.
    """

    def __init__(self, end: socket.socket, look: Callable[[], bool] | None = None) -> None:
        end.setblocking(False)
        self._end, self._look = end, look

    def send(self, data: bytes, deadline: float = math.inf) -> None:
        """Send a message. `deadline` is on the clock `time.monotonic`.

        Raises TimeoutError: the deadline has passed; EOFError or OSError: the other process has ended.
        """
        for part in (_LENGTH.pack(len(data)), data):
            left = memoryview(part)
            while left:
                self._wait(select.POLLOUT, deadline)
                left = left[self._end.send(left) :]

    def receive(self, deadline: float = math.inf) -> bytes:
        """The next message. Raises WireError: it is too long. For other errors see `send`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > MOST_BYTES:
            raise WireError(f"a message announces {length} bytes; at most {MOST_BYTES} are allowed")
        return self._read(length, deadline)

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(select.POLLIN, deadline)
            part = self._end.recv(min(size - len(data), _CHUNK))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket can take bytes (the event POLLOUT) or has bytes (POLLIN)."""
        poll = select.poll()
        poll.register(self._end, event)
        if self._look is None:
            poll.poll()
            return
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if poll.poll(1000 * min(WATCH_S, left)):
                return
            # Other processes may hold copies of the other end, so the pipe may stay open after the process has ended.
            # The bytes that the process wrote before its end are still read.
            if self._look() and not poll.poll(0):
                raise EOFError
