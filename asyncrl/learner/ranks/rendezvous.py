"""How the hosts of a learner meet and hear of each other: the messages, and a connection to the first host.

The first host answers on one ZeroMQ socket, with the run's keys where there are such. Other hosts join there, send what
their ranks do, and hear whether all must stop. The ranks of all hosts keep there what torch needs to connect them. A
round is one start of all ranks; its name is known to those alone who joined.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

import asyncrl
from asyncrl.config.changes import is_of_run, values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.learner.ranks.activity import RankState
from asyncrl.network.keys import ClientKeys
from asyncrl.network.sockets import connect, try_send

MAX_MESSAGE_BYTES = 1 << 20


class Join(msgspec.Struct, frozen=True, tag=True):
    """A host is there. `process` is new at each of its starts. `sees_folder`: it found the file that the first host
    wrote for `round` into the run's folder, and wrote its own."""

    node: int
    process: str
    settings: dict[str, str]
    round: str = ""
    sees_folder: bool = False


class Joined(msgspec.Struct, frozen=True):
    """Why the hosts cannot start, or whether all are there, and which are not."""

    round: str
    refused: str
    begun: bool
    absent: list[int]


class Alive(msgspec.Struct, frozen=True, tag=True):
    """What the ranks of a host do. `stopping`: it was asked to stop."""

    round: str
    node: int
    states: list[RankState]
    stopping: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a host have ended; `reason` says why they failed, if they did. `final`: no start will do better."""

    round: str
    node: int
    reason: str
    final: bool


class Verdict(msgspec.Struct, frozen=True):
    """Whether all ranks stop, and why they must end at once, if they must. `final`: no start will do better."""

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
    """The value of a key after the call; None where it has none."""

    value: bytes | None


Request = Join | Alive | Ended | StoreCall


def settings_of(config: TrainConfig) -> dict[str, str]:
    """A digest of the value of each key that all hosts must have alike."""
    alike = {key: json.dumps(value, sort_keys=True) for key, value in values_of(config).items() if is_of_run(key)}
    return {key: hashlib.sha256(value.encode()).hexdigest() for key, value in alike.items()}


def mark_of(folder: Path, round_name: str, node: int) -> Path:
    """The file by which a host shows that it shares the run's folder."""
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
        """The first host's answer, a `kind`. Raises UnavailableError: it came not in time; ConfigError: it is none."""
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
                "; or network.keys has keys of another run, or that host 0 does not allow (its log names those refused)"
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
                f"on all hosts; this one has {asyncrl.__version__}"
            ) from error

    def close(self) -> None:
        with self._lock:
            self._socket.close()
