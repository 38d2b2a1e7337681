"""The facts about a server that are found out before its first weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncrl.engine.sglang.facts import facts_of

LISTENING = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""
CPU_SERVER = {"device": "cpu", "tp_size": 1, "base_gpu_id": 0}
GPU_SERVER = {"device": "cuda", "tp_size": 2, "base_gpu_id": 3}


@contextmanager
def listening(*arguments: str, **environment: str) -> Iterator[int]:
    """The port at which another process listens."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.communicate()


@pytest.mark.slow
def test_a_server_of_this_machine_is_known_by_the_process_that_listens() -> None:
    with listening("sglang") as port:
        found = facts_of("127.0.0.1", port, GPU_SERVER, taken=(5,))
        assert (found.here, list(found.gpus), found.same_gpus, found.taken) == (True, [3, 4], True, (5,))
        assert not facts_of("127.0.0.1", port, CPU_SERVER).gpus
        assert not facts_of("192.0.2.1", port, GPU_SERVER).here, "the address is another machine's"
    with listening("sglang", CUDA_VISIBLE_DEVICES="6,7") as port:
        assert not facts_of("127.0.0.1", port, GPU_SERVER).same_gpus
    with listening("a tunnel") as port:
        assert not facts_of("127.0.0.1", port, GPU_SERVER).here


@pytest.mark.parametrize("answer", [{}, {"device": None, "tp_size": None, "base_gpu_id": None}])
def test_a_server_that_says_nothing_of_its_device_counts_as_one_without_gpus(answer: dict[str, Any]) -> None:
    assert not facts_of("127.0.0.1", 1, answer).gpus
