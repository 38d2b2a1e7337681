"""Measures the gain of delivering several trajectories at once to a distant replay.

The link is a relay that delays bytes by DELAY_S in each direction, without a limit on bytes a second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from msgspec import structs

from asyncrl.machine.ports import LOOPBACK
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Trajectory
from benchmarks.serving import OWN_RUN, load, replay
from benchmarks.wire import make_trajectory

DELAY_S = 0.05
TOGETHER = 32
ONE_BY_ONE = 8
ROUNDS = 5
START_S = 60.0
Spawn = multiprocessing.get_context("spawn")


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Forward each piece of data `delay_s` after it was read."""
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while (piece := await pieces.get())[1]:
            await asyncio.sleep(piece[0] - time.monotonic())
            writer.write(piece[1])
            await writer.drain()
        writer.close()

    async with asyncio.TaskGroup() as both:
        both.create_task(write())
        while True:
            data = await reader.read(1 << 16)
            pieces.put_nowait((time.monotonic() + delay_s, data))
            if not data:
                return


async def _relay(port: int, delay_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there = await asyncio.open_connection(LOOPBACK, port)
    async with asyncio.TaskGroup() as ways:
        ways.create_task(_hand_on(reader, there[1], delay_s))
        ways.create_task(_hand_on(there[0], writer, delay_s))


async def _serve(port: int, delay_s: float, told: Queue[int]) -> None:
    server = await asyncio.start_server(partial(_relay, port, delay_s), LOOPBACK, 0)
    told.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def serve(port: int, delay_s: float, told: Queue[int]) -> None:
    """Relay to a port of this machine until the process is killed, and report the relay's own port."""
    asyncio.run(_serve(port, delay_s, told))


@contextmanager
def far(endpoint: str, delay_s: float) -> Iterator[str]:
    """An endpoint that relays to another endpoint with a delay of `delay_s`."""
    told: Queue[int] = Spawn.Queue()
    process = Spawn.Process(target=serve, args=(int(endpoint.rpartition(":")[2]), delay_s, told), daemon=True)
    process.start()
    try:
        yield f"tcp://{LOOPBACK}:{told.get(timeout=START_S)}"
    finally:
        process.kill()
        process.join()


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    """Trajectories a second that one client delivers over the link, alternately one and TOGETHER in a round trip."""
    made = make_trajectory(tokens, version=0)
    seconds = {"one_by_one": 0.0, "together": 0.0}
    with replay(folder) as served, far(served.endpoints[0], DELAY_S) as endpoint:
        client = ReplayClient(endpoint, "actor", "1", run=OWN_RUN)

        def deliver(name: str, count: int, put: Callable[[Sequence[Trajectory]], Sequence[object]]) -> None:
            episodes: list[Trajectory] = []
            while len(episodes) < count:
                given = client.tickets([each.id for each in episodes], count - len(episodes))
                episodes += [
                    structs.replace(made, id=each.id, task_id=each.task.id, group_id=each.group_id, member=each.member)
                    for each in given
                ]
            began = time.perf_counter()
            assert set(put(episodes)) == {"stored"}
            seconds[name] += time.perf_counter() - began

        for _ in range(ROUNDS):
            deliver("one_by_one", ONE_BY_ONE, lambda episodes: [client.put(each) for each in episodes])
            deliver("together", TOGETHER, client.put_all)
        client.close()
    rates = {
        f"{name}_per_s": ROUNDS * count / seconds[name]
        for name, count in (("one_by_one", ONE_BY_ONE), ("together", TOGETHER))
    }
    return {"delay_ms": DELAY_S * 1e3, "tokens": tokens, **rates, "load": load()}
