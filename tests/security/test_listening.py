"""A whole run with keys listens where docs/security.md says, and only there; synchronous training is on-policy."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import psutil
import pytest

from asyncrl.types import Task
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run, read_config
from tests.helpers import until
from tests.network.support import made

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS = 2
SHARDS = 2
STEPS = 4
LOOPBACK = "127.0.0.1"
FREE = "free"

Sockets = dict[str, list[str]]


async def one_request(task: Task, base_url: str, api_key: str) -> None:
    """An agent that has one answer."""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session,
        session.post(f"{base_url}/chat/completions", json={"messages": [*task.messages]}) as response,
    ):
        await response.read()


def documented() -> list[dict[str, str]]:
    """The rows of the table in docs/security.md, by the names of its columns."""
    text = (ROOT / "docs" / "security.md").read_text()
    section = text[text.index("## What listens") :].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def expected(run: Run, settings: set[str]) -> Sockets:
    """The ports that each process should listen on by the table, under `settings`."""
    config = read_config(run.dir)
    ports = {key: getattr(config.network, key.split(".")[1]) for key in ("network.replay_port", "network.weights_port")}
    processes = {
        "each replay shard": [f"replay-{shard}" for shard in range(SHARDS)],
        "each learner rank": [f"learner-{rank}" for rank in range(RANKS)],
        "learner rank 0": ["learner-0"],
        "each actor": ["actor-0"],
    }
    found: Sockets = defaultdict(list)
    for row in documented():
        if row["when"] in settings:
            for offset, process in enumerate(processes[row["process"]]):
                key = row["port"].split(" ")[0].strip("`")
                found[process].append(str(ports[key] + offset) if key in ports else FREE)
    return {process: sorted(numbers) for process, numbers in found.items()}


def listening(run: Run) -> dict[str, list[tuple[str, int]]]:
    """Address and port of every socket of the run's processes that strangers may send to."""
    names = {pid: name for name, pid in run.processes().items()} | {run.process.pid: "supervisor"}
    found: dict[str, list[tuple[str, int]]] = {}
    top = psutil.Process(run.process.pid)
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # One may have ended since.
            name = names.get(process.pid) or f"a child of {names.get(process.ppid(), 'a child')}"
            open_ones = [
                (each.laddr.ip, each.laddr.port)
                for each in process.net_connections("inet")
                if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
            ]
            if open_ones:
                found.setdefault(name, []).extend(open_ones)
    return found


def ports_of(found: Mapping[str, list[tuple[str, int]]], fixed: set[str]) -> Sockets:
    """Ports by process, those that are not among `fixed` as free ones."""
    return {
        name: sorted(str(port) if str(port) in fixed else FREE for _, port in sockets)
        for name, sockets in found.items()
    }


def other_interface() -> str | None:
    """A network interface with an address that others may reach."""
    addresses: dict[str, Any] = psutil.net_if_addrs()
    for name, found in addresses.items():
        if any(re.fullmatch(r"[\d.]+", each.address) and not each.address.startswith("127.") for each in found):
            return name
    return None


@pytest.fixture(scope="module", params=["auto", "disk", "distributed"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Run]]:
    """A channel of weights, and a synchronous run with keys that has done some steps."""
    folder, channel = tmp_path_factory.mktemp("run"), request.param
    fleet = [f"cluster.learner_ranks={RANKS}", "cluster.actors=1", "replay.max_lag=0", "learner.steps=100000"]
    agent = f"actor.agent={one_request.__module__}.{one_request.__name__}"
    overrides = [*World.make(folder).overrides(SHARDS), *fleet, agent, f"network.keys={made(folder / 'keys')}"]
    with pytest.MonkeyPatch.context() as patched:
        if interface := other_interface():
            # What gloo would choose by itself depends on how the machine's name resolves.
            patched.setenv("GLOO_SOCKET_IFNAME", interface)
        with Run("train", folder, *overrides, f"weights.to_engines={channel}") as run:
            run.wait_for_step(STEPS - 1)
            yield channel, run


@pytest.mark.timeout(900)
def test_synchronous_training_with_keys_is_on_policy_and_engine_and_learner_agree(run: tuple[str, Run]) -> None:
    steps = run[1].steps()[:STEPS]
    assert [line["lag/max"] for line in steps] == [0.0] * STEPS
    assert [line["mismatch/agree"] for line in steps] == [1.0] * STEPS


@pytest.mark.timeout(900)
def test_a_run_listens_on_what_the_documentation_lists_and_on_loopback_only(run: tuple[str, Run]) -> None:
    channel, running = run
    wanted = expected(running, {"always", f"`weights.to_engines={channel}`", "`actor.agent`"})
    fixed = {port for ports in wanted.values() for port in ports}
    seen: dict[str, Any] = {}

    def as_listed() -> bool:
        assert running.process.poll() is None, running.output
        seen.update(now=listening(running))
        outside = {(name, each) for name, sockets in seen["now"].items() for each in sockets if each[0] != LOOPBACK}
        assert not outside
        return ports_of(seen["now"], fixed) == wanted

    try:
        until(as_listed)
    except AssertionError:
        assert ports_of(seen["now"], fixed) == wanted, seen["now"]
        raise
