"""Upper limits for moving bytes on this machine: through a plain socket, in memory, to and on a GPU."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from asyncrl.weights.group import WeightGroup

CHUNK = 4 << 20
ROUNDS = 6


def pour(plain: socket.socket, nbytes: int) -> None:
    """Send `nbytes` bytes to each client that connects, in pieces of CHUNK bytes, until `plain` is closed."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).data
    while True:
        try:
            peer = plain.accept()[0]
        except OSError:
            return
        with peer:
            for start in range(0, nbytes, CHUNK):
                peer.sendall(data[start : start + CHUNK])


def socket_seconds(port: int, nbytes: int) -> float:
    """Seconds for receiving `nbytes` bytes through a plain socket into fresh memory."""
    target = np.empty(nbytes, np.uint8).data
    begun = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        received = 0
        while received < nbytes:
            received += peer.recv_into(target[received : received + CHUNK])
    return time.perf_counter() - begun


def broadcast_seconds(group: WeightGroup, data: torch.Tensor, piece: int) -> float:
    """Seconds for broadcasts in pieces of `piece` bytes. Rank 0 sends `data`, and the other rank receives into it."""
    begun = time.perf_counter()
    works = [group.begin(part) for part in data.split(piece)]
    for work in works:
        group.finish(work)
    return time.perf_counter() - begun


def touch(nbytes: int) -> None:
    """Touch that much free memory. A virtual machine's host takes back memory that was idle for a second or two. The
    first touch after that was measured at 0.5 GB/s instead of 7: slower than any transfer."""
    np.empty(nbytes, np.uint8).fill(0)


def tensor_copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """GB/s of a plain copy, after a warm-up."""

    def wait() -> None:
        for tensor in (source, target):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

    def copy() -> float:
        wait()
        begun = time.perf_counter()
        target.copy_(source)
        wait()
        return time.perf_counter() - begun

    return _rate(copy, source.nbytes)


def link_limits(nbytes: int = 256 << 20) -> dict[str, float]:
    """GB/s of a loopback socket between two threads and of a copy in memory, to a GPU and on a GPU."""
    host = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    limits = {"socket": _socket_rate(nbytes), "memory": tensor_copy_rate(host, torch.empty_like(host))}
    if torch.cuda.is_available():
        device = host.cuda()
        limits["host to device"] = tensor_copy_rate(host.pin_memory(), torch.empty_like(device))
        limits["host to device, not pinned"] = tensor_copy_rate(host, torch.empty_like(device))
        limits["on the device"] = tensor_copy_rate(device, torch.empty_like(device))
    if torch.cuda.device_count() > 1:
        limits["device to device"] = tensor_copy_rate(device, torch.empty_like(device, device="cuda:1"))
    return {name: round(rate, 2) for name, rate in limits.items()}


def _socket_rate(nbytes: int) -> float:
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        sender = threading.Thread(target=pour, args=(plain, nbytes), daemon=True)
        sender.start()
        port = int(plain.getsockname()[1])
        rate = _rate(lambda: socket_seconds(port, nbytes), nbytes)
        plain.shutdown(socket.SHUT_RDWR)
        sender.join()
    return rate


def _rate(seconds: Callable[[], float], nbytes: int) -> float:
    return nbytes / statistics.median([seconds() for _ in range(ROUNDS)][1:]) / 1e9
