"""Which ways a server gets weights by, and what is found out about it before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asyncrl.engine.sglang.ways import ServerFacts, choose, facts_of

ON_GPU = ServerFacts(here=True, gpus=(0, 1), same_gpus=True, visible=4)
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


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        (ON_GPU, ["ipc", "disk", "gloo"]),
        (ServerFacts(here=True, gpus=(0,), same_gpus=False, visible=4), ["disk", "gloo"]),
        (ServerFacts(here=True, gpus=(7,), same_gpus=True, visible=4), ["disk", "gloo"]),
        (ServerFacts(here=False, gpus=(0,), same_gpus=True, visible=4), ["disk"]),
        (ServerFacts(here=True), ["disk", "gloo"]),
        (ServerFacts(here=False), ["disk"]),
    ],
)
def test_auto_takes_the_fastest_way_that_is_possible_and_cannot_hang(facts: ServerFacts, names: list[str]) -> None:
    ways, reasons = choose("auto", facts)
    assert [way.name for way in ways] == names
    left_out = {"ipc", "nccl", "disk", "gloo"} - set(names)
    assert all(f"not by {name}: " in reasons for name in left_out)


@pytest.mark.parametrize("name", ["ipc", "nccl", "disk", "gloo"])
def test_a_way_that_is_named_is_the_only_one(name: str) -> None:
    ways, reasons = choose(name, ON_GPU)
    assert ([way.name for way in ways], reasons) == ([name], "")


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("ipc", ServerFacts(here=True), "runs on the CPU"),
        ("ipc", ServerFacts(gpus=(0,), visible=1), "cannot see the server's process"),
        ("ipc", ServerFacts(here=True, gpus=(0,), visible=1), "do not see the same GPUs"),
        ("nccl", ServerFacts(here=True, visible=1), "runs on the CPU"),
        ("nccl", ServerFacts(here=True, gpus=(0, 1), visible=2), "has a server"),
    ],
)
def test_a_way_that_is_named_and_impossible_is_refused_with_the_reason(
    name: str, facts: ServerFacts, reason: str
) -> None:
    ways, reasons = choose(name, facts)
    assert not ways
    assert reason in reasons


def test_nccl_sends_from_the_last_gpu_without_a_server() -> None:
    assert ON_GPU.spare_gpu == torch.device("cuda", 3)
    assert ServerFacts(here=True, gpus=(0,), visible=4, taken=(2, 3)).spare_gpu == torch.device("cuda", 1)
    assert ServerFacts(here=False, gpus=(0,), visible=1).spare_gpu == torch.device("cuda", 0)


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
