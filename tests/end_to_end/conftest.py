"""Runs that are stopped when their test ends, and the demo's parts, prepared once for all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.demo.command import CACHE, SEED, prepared_overrides
from asyncrl.demo.prepare import prepare
from tests.end_to_end.support import ADDRESSES, ROOT, Run

LONGEST_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs take minutes, and share the machine with whatever else is tested."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture(scope="session")
def prepared() -> list[str]:
    """The command line that trains on the demo's task."""
    return prepared_overrides(prepare(ROOT / CACHE, SEED, lambda _: None))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `asyncrl COMMAND KEY=VALUE ...` in a run folder of the test's own."""
    with ExitStack() as runs:
        yield lambda command, *overrides: runs.enter_context(Run(command, tmp_path, *overrides))


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """The names of two network namespaces with ADDRESSES."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"asyncrl-{os.getpid()}-{node}" for node in range(2)]
    with ExitStack() as stack:
        for name in names:
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this machine grants no network namespace: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ends = [f"link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}"]
        for name, address in zip(names, ADDRESSES, strict=True):
            ends += [f"-n {name} link set lo up", f"-n {name} addr add {address}/24 dev veth0"]
            ends += [f"-n {name} link set veth0 up"]
        for each in ends:
            subprocess.run(["ip", *each.split()], check=True)
        for name in names:
            # Not every kernel can delay packets.
            delay = ["tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "netem", "delay", "20ms"]
            subprocess.run(delay, capture_output=True, check=False)
        yield names
