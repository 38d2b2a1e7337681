"""Runs that are stopped when their test ends, and the demo's parts, prepared once for all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.commands.demo.prepare import CACHE, SEED, prepare_demo, prepared_overrides
from tests.end_to_end import slow_cable
from tests.end_to_end.support import ADDRESSES, DELAY_S, DEVICE, ROOT, Run

LONGEST_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whole runs a longer limit: they take minutes, and share the machine with other tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture(scope="session")
def prepared() -> list[str]:
    """The command line that trains on the demo's task."""
    return prepared_overrides(prepare_demo(ROOT / CACHE, SEED, lambda _: None))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `asyncrl COMMAND KEY=VALUE ...` in a run folder of the test's own."""
    with ExitStack() as runs:
        yield lambda command, *overrides: runs.enter_context(Run(command, tmp_path, *overrides))


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """The names of two network namespaces with ADDRESSES, joined by a virtual cable."""
    with ExitStack() as stack:
        names = make_namespaces(stack)
        ip(f"link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
        give_addresses(names)
        yield names


@pytest.fixture
def far_namespaces() -> Iterator[list[str]]:
    """The same, and each packet takes DELAY_S: by the kernel's netem, or else by a process between two devices."""
    with ExitStack() as stack:
        names = make_namespaces(stack)
        ip(f"link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
        netem = ["qdisc", "add", "dev", DEVICE, "root", "netem", "limit", "100000", "delay", f"{DELAY_S:g}s"]
        if any(subprocess.run(["tc", "-n", name, *netem], capture_output=True).returncode for name in names):
            ip(f"-n {names[0]} link del {DEVICE}")
            module = f"{slow_cable.__package__}.{Path(slow_cable.__file__).stem}"
            cable = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, *names, DEVICE, str(DELAY_S)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
            assert cable.stdout is not None
            assert cable.stderr is not None
            if cable.stdout.readline() != b"ready\n":
                pytest.skip(f"this machine can delay no packets: {cable.stderr.read().decode().strip()[-200:]}")
        give_addresses(names)
        yield names


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def make_namespaces(stack: ExitStack) -> list[str]:
    """The names of two namespaces that are deleted with `stack`."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"asyncrl-{os.getpid()}-{node}" for node in range(2)]
    for name in names:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this machine grants no network namespace: {done.stderr.strip()}")
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
    return names


def give_addresses(names: list[str]) -> None:
    for name, address in zip(names, ADDRESSES, strict=True):
        ip(f"-n {name} link set lo up")
        ip(f"-n {name} addr add {address}/24 dev {DEVICE}")
        ip(f"-n {name} link set {DEVICE} up")
