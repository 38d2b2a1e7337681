"""`python -m tests.security.published [KEYS]`: a weight publisher in a process of its own.

It prints its endpoint, and then the number of refused requests for every line that it reads.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import torch
import zmq

from asyncrl.network.keys import server_keys
from asyncrl.weights.server import WeightServer
from tests.chaos.support import Target
from tests.helpers import OWN_RUN

CHUNK_BYTES = 4096


class PublisherProcess(Target):
    """A weight publisher that has published version 1 of `tensors()`. With a folder of `keys`, only clients with these
    keys get it."""

    def __init__(self, folder: Path, *keys: Path) -> None:
        super().__init__(folder, __name__, *map(str, keys))

    def start(self) -> None:
        super().start()
        self.endpoint = self._line()
        assert self.endpoint, self.log()

    def refused(self) -> int:
        """Return the number of requests that it says it has refused."""
        assert self.process.stdin is not None
        self.process.stdin.write("refused\n")
        self.process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6000, dtype=torch.float32), "bias": torch.full((7,), 0.5)}


def main() -> None:
    keys = server_keys(sys.argv[1] if len(sys.argv) > 1 else None)
    publisher = WeightServer("127.0.0.1", 0, zmq.Context(), keys=keys, run=OWN_RUN, chunk_bytes=CHUNK_BYTES)
    publisher.publish(1, tensors())
    for answer in chain([publisher.endpoint], (publisher.refused for _ in sys.stdin)):
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
