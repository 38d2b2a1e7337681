"""The stop of a push: from telling a server to stop until it may sample again, and nothing before that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.fleet.folders import Folders
from tests.engine.fleet.fakes import (
    FakeSglang,
    canary_check,
    counter,
    fleet_over,
    sample,
    servers_ready,
    serving,
    tensors,
)
from tests.helpers import OWN_RUN, async_until

pytestmark = pytest.mark.slow

PREPARE_S = 100.0
CALLS_S = {
    "pause_generation": 0.25,
    "abort_request": 0.5,
    "update_weights_from_disk": 2.0,
    "continue_generation": 0.125,
    "generate": 8.0,
}
"""The seconds of each call by the clock of the fleet; of calls to `generate` only those for the canary."""


class TimedSglang(FakeSglang):
    """A fake server whose calls only advance `clock`, the seconds of which are its item 0."""

    def __init__(self, version: str, clock: list[float]) -> None:
        super().__init__(version)
        for name, seconds in CALLS_S.items():
            self.answers[name] = self._timed(name, seconds, clock)

    def _timed(self, name: str, seconds: float, clock: list[float]) -> Any:
        answer = getattr(FakeSglang, f"_{name}")

        async def call(body: Any) -> Any:
            if name != "generate" or "logprob_start_len" in body:
                clock[0] += seconds
            return await answer(self, body)

        return call


@pytest.mark.parametrize(
    ("mode", "version", "stop_s"),
    [
        ("retract", "0.5.23", 0.25 + 2.0 + 0.125),
        ("in_place", "0.5.23", 0.25 + 2.0 + 0.125),
        ("abort", "0.5.23", 0.5 + 2.0),
        ("retract", "0.5.17", 0.5 + 2.0),
        ("drain", "0.5.23", 2.0),
    ],
)
async def test_the_stop_of_a_push_is_measured_without_what_the_server_does_before_it(
    mode: str, version: str, stop_s: float, tmp_path: Path
) -> None:
    """And without the canary: the server goes on before it answers that."""
    clock = [0.0]

    def prepare(folder: Path) -> None:
        clock[0] += PREPARE_S

    server = TimedSglang(version, clock)
    folders = Folders(tmp_path, prepare, OWN_RUN)
    async with serving(server), fleet_over(server, mode=mode, folders=folders, clock=lambda: clock[0]) as fleet:
        await fleet.update_weights(0, tensors(0), canary_check(0))
        await servers_ready(fleet, 1)
        assert counter(fleet, "push_pauses") == counter(fleet, "push_pause_s") == 0
        for push in (1, 2):
            if mode != "drain":
                server.hold_until(push)
            working = asyncio.create_task(sample(fleet, 300, f"s{push}"))
            await async_until(lambda: server.running)
            await fleet.update_weights(push, tensors(push), canary_check(push))
            await working
        counters = fleet.stats().counters
    assert counters["push_pauses"] == 2
    assert counters["push_pause_s"] == 2 * stop_s
    assert counters["push_pause_last_s"] == counters["push_pause_max_s"] == stop_s
