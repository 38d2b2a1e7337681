"""The messages between the learner's hosts, and a connection to the first host.

The first host answers on one ZeroMQ socket, with the run's keys if there are any. Other hosts join there, send the
states of their ranks, and learn whether all must stop. The first host also stores the values by which torch connects
the ranks of all hosts. A round is one start of all ranks, and only hosts that joined know its name.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.learner.ranks.activity import RankState
from asyncrl.network.keys import ClientKeys
from asyncrl.network.sockets import connect, try_send
from asyncrl.version import VERSION

MAX_MESSAGE_BYTES = 1 << 20


class Join(msgspec.Struct, frozen=True, tag=True):
    """A host joins.

    - `process`: a random name, which is new at each start of the host's launcher.
    - `settings`: the digests that all hosts must share.
    - `sees_folder`: the host found the file that the first host wrote for `round` into the run's folder, and wrote its
      own file.
    """

    node: int
    process: str
    settings: dict[str, str]
    round: str = ""
    sees_folder: bool = False


class Joined(msgspec.Struct, frozen=True):
    """The first host's answer.

    - `refused`: the reason why the hosts cannot start, or "".
    - `begun`: all hosts have joined.
    - `absent`: the hosts that have not joined yet.
    """

    round: str
    refused: str
    begun: bool
    absent: list[int]


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The states of a host's ranks. `stopping`: the host was asked to stop."""

    round: str
    node: int
    states: list[RankState]
    stopping: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a host have ended. `reason` is the reason if they failed. `final`: another start would fail, too."""

    round: str
    node: int
    reason: str
    final: bool


class Verdict(msgspec.Struct, frozen=True):
    """The first host's verdict on all ranks.

    - `stop`: the ranks are asked to stop.
    - `over`: the reason to end the ranks at once, or "".
    - `final`: another start would fail, too.
    """

    stop: bool
    over: str
    final: bool = False


class StoreCall(msgspec.Struct, frozen=True, tag=True):
    """A call of torch's store."""

    round: str
    method: Literal["set", "get", "add", "compare_set", "delete_key"]
    key: str
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


class Stored(msgspec.Struct, frozen=True):
    """The value of a key after the call. None: the key has no value."""

    value: bytes | None


Request = Join | Alive | Ended | StoreCall


def mark_of(folder: Path, round_name: str, node: int) -> Path:
    """Return the file by which a host shows that it shares the run's folder."""
    return folder / f".host-{node}-{round_name}"


class Caller:
    """A connection to the first host at `endpoint`. Any thread may call it."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: ClientKeys | None) -> None:
        self._context, self._endpoint, self._keys = context, endpoint, keys
        self._lock = threading.Lock()
        self._number = 0
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = connect(self._context, self._endpoint, self._keys, MAX_MESSAGE_BYTES)
        return socket

    def call(self, request: Request, kind: type[Any], timeout_s: float) -> Any:
        """Send a request and wait for the first host's answer, of the type `kind`. Raises UnavailableError: no answer
        came in time; ConfigError: the answer comes from another version of asyncrl."""
        with self._lock:
            self._number += 1
            number, deadline = str(self._number).encode(), time.monotonic() + timeout_s
            if self._socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
                try_send(self._socket, [number, msgspec.msgpack.encode(request)])
                while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                    answered, answer = self._socket.recv_multipart()
                    if answered == number:
                        return self._decoded(answer, kind)
            self._socket.close()
            self._socket = self._connect()
        raise UnavailableError(
            f"{self._endpoint} has not answered for {timeout_s:g} s: look whether host 0 runs and whether "
            "learner.rendezvous is its address"
            + (
                "; or network.keys has keys of another run, or keys that host 0 refuses (its log names them)"
                if self._keys is not None
                else "; or host 0 has network.keys, and this host has none"
            )
        )

    def _decoded(self, answer: bytes, kind: type[Any]) -> Any:
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._endpoint} does not answer as this version of asyncrl does ({error}): install the same version "
                f"on all hosts; this one has {VERSION}"
            ) from error

    def close(self) -> None:
        with self._lock:
            self._socket.close()
