"""The rollout benchmark over a server of its own that answers at once, and over the fleet's fake of SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import Load, Run, bare_client, fleet_client
from benchmarks.fleet_cost import instant_fleet
from benchmarks.fleets import Policy, Push
from benchmarks.instant_server import VOCABULARY
from benchmarks.push_under_load import PushLoad, measure
from benchmarks.throughput import compare, processor_cost, rows
from tests.engine.fleet.fakes import FakeSglang, run, serving

pytestmark = pytest.mark.slow


def test_clients_take_turns_and_are_told_against_the_bare_one() -> None:
    async def scenario() -> Any:
        async with instant_fleet() as (url, fleet), bare_client([url], logprobs=True) as bare:
            clients = {"fleet": fleet_client(fleet), "bare": bare}
            load = Load(prompt=4, output=8, vocabulary=VOCABULARY)
            return await compare(clients, load, concurrency=2, requests=4, rounds=2)

    runs = run(scenario)
    assert {name: len(taken) for name, taken in runs.items()} == {"fleet": 2, "bare": 2}
    fleet, bare = rows(runs, tokens=32, limit="bare")
    assert fleet["tokens_per_s"] > 0
    assert bare["ratio_to_bare"] == 1.0
    assert all(run.cpu_s > 0 for taken in runs.values() for run in taken)


def test_the_processor_time_of_a_request_is_what_its_tokens_leave() -> None:
    cost = processor_cost([Run(1.0, 0.012)], [Run(1.0, 0.04)], 4, (1, 8))
    assert (cost["us_per_request"], cost["us_per_token"]) == (2000.0, 1000.0)


def pushes(folder: Path, load: PushLoad, mode: str, version: str) -> Any:
    """The figures of pushes into a fake server of this version."""

    async def scenario() -> Any:
        server = FakeSglang(version)
        async with serving(server):
            return await measure([server.url], Policy.of_one_number(folder, 100), load, Push(mode), folder / "w")

    return run(scenario)


def test_pushes_under_load_lose_no_request(tmp_path: Path) -> None:
    load = PushLoad(requests=4, prompt=4, shortest=2, longest=6, pushes=2, calm_s=1.0)
    row = pushes(tmp_path, load, "abort", "0.5.23")
    assert row["lost"] == 0
    assert row["answered"] >= 8
    assert len(row["each_push"]) == 2
    assert 0 < row["load_s"] <= row["switch_s"] <= row["push_s"]


def test_a_mode_that_the_server_does_as_another_one_is_not_measured(tmp_path: Path) -> None:
    load = PushLoad(requests=1, prompt=4, shortest=2, longest=6, pushes=1, calm_s=0.1)
    assert pushes(tmp_path, load, "retract", "0.5.17") is None
