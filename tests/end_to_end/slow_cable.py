"""A cable between two network namespaces that delays every packet, for kernels without netem.

`python -m tests.end_to_end.slow_cable NAMESPACE NAMESPACE DEVICE SECONDS` makes an Ethernet device (TAP) in each
namespace, says `ready`, and hands the frames of each to the other after so many seconds, until its input ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
"""Constants of Linux's sched.h and if_tun.h."""
FRAME_BYTES = 1 << 16


def open_device(namespace: str, name: str) -> int:
    """A new device in a namespace, which this thread enters. Raises OSError: the system does not grant it."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def relay(devices: tuple[int, int], delay_s: float) -> None:
    """Hand frames from each device to the other until the standard input ends."""
    other = dict(zip(devices, reversed(devices), strict=True))
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([*devices, sys.stdin], [], [], wait_s)
        if sys.stdin in ready:
            return
        for device in ready:
            with suppress(BlockingIOError):
                while True:
                    frame = os.read(device, FRAME_BYTES)
                    under_way.append((time.monotonic() + delay_s, other[device], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, frame = under_way.popleft()
            with suppress(OSError):  # A cable loses what a device that is down does not take.
                os.write(device, frame)


if __name__ == "__main__":
    one, another, name, seconds = sys.argv[1:]
    both = (open_device(one, name), open_device(another, name))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(both, float(seconds))
