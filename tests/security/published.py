"""`python -m tests.security.published [KEYS]`: a weight publisher in a process of its own.

It prints its endpoint, and then the number of refused requests for every line that it reads.
"""

from __future__ import annotations

import sys

import torch
import zmq

from asyncrl.config.schema import NetworkConfig
from asyncrl.network.keys import server_keys
from asyncrl.types import RunIdentity
from asyncrl.weights.server import WeightServer

CHUNK_BYTES = 4096
RUN = RunIdentity("train", "its id")


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6000, dtype=torch.float32), "bias": torch.full((7,), 0.5)}


def main() -> None:
    keys = server_keys(NetworkConfig(keys=sys.argv[1] if len(sys.argv) > 1 else None))
    publisher = WeightServer("127.0.0.1", 0, zmq.Context(), keys=keys, run=RUN, chunk_bytes=CHUNK_BYTES)
    publisher.publish(1, tensors())
    sys.stdout.write(f"{publisher.endpoint}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        sys.stdout.write(f"{publisher.refused}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
