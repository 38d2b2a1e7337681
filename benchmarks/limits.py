"""Upper limits of the machine for the bytes of trajectories: sockets alone, LMDB alone, the disk alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import zmq

from benchmarks.serving import load

CREDITS = 8
SENDERS = 8
PER_COMMIT = 64
Spawn = multiprocessing.get_context("spawn")


def measure(folder: Path, size: int, count: int = 8000) -> Iterator[dict[str, Any]]:
    """Measure how many messages or values of `size` bytes each limit allows in a second."""
    for name, work in (("router with credits", router), ("lmdb, fsync", store), ("write, fdatasync", write)):
        before = os.times()
        seconds = work(folder, size, count)
        busy = sum(os.times()[:4]) - sum(before[:4])
        yield {
            "limit": name,
            "per_s": count / seconds,
            "mb_per_s": count * size / seconds / 1e6,
            "cpu_us": busy / count * 1e6,
            "load": load(),
        }


def router(folder: Path, size: int, count: int) -> float:
    """`SENDERS` processes send to one ROUTER, which answers each message with its number."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    senders = [Spawn.Process(target=send, args=(port, size, count // SENDERS)) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    socket.poll()
    started = time.perf_counter()
    for _ in range(count // SENDERS * SENDERS):
        client, number, *_ = socket.recv_multipart(copy=False)
        socket.send_multipart([client, number], copy=False)
    seconds = time.perf_counter() - started
    for sender in senders:
        sender.join()
    context.destroy()
    return seconds


def send(port: int, size: int, count: int) -> None:
    """Send `count` messages of two large frames and a number, with at most `CREDITS` of them unanswered."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    half = bytes(size // 2)
    for number in range(count + CREDITS):
        if number >= CREDITS:
            socket.recv_multipart()
        if number < count:
            socket.send_multipart([b"%d" % number, half, half], copy=False)
    context.destroy()


def store(folder: Path, size: int, count: int) -> float:
    """Put values into LMDB, `PER_COMMIT` to a durable transaction."""
    value = bytes(size)
    with lmdb.open(str(folder / "lmdb"), map_size=size * count * 3) as environment:
        started = time.perf_counter()
        for start in range(0, count, PER_COMMIT):
            with environment.begin(write=True) as tx:
                for number in range(start, min(start + PER_COMMIT, count)):
                    tx.put(b"%012d" % number, value)
        return time.perf_counter() - started


def write(folder: Path, size: int, count: int) -> float:
    """Write the same bytes sequentially, with as many syncs to the disk."""
    value = bytes(size)
    with (folder / "plain").open("wb", buffering=0) as file:
        started = time.perf_counter()
        for number in range(count):
            file.write(value)
            if number % PER_COMMIT == PER_COMMIT - 1:
                os.fdatasync(file.fileno())
        return time.perf_counter() - started
