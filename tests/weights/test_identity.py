"""The run of weights: every request for weights names its run, and a publisher of another run refuses it by name."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq
import zmq.asyncio

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import StoppedError, UnavailableError, WireError
from asyncrl.learner.from_config import run as learn
from asyncrl.machine.activity import Activity
from asyncrl.machine.ports import free_ports
from asyncrl.network.listener import Listener
from asyncrl.types import RunIdentity
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.from_config import open_routes
from asyncrl.weights.requests import Requests
from tests.helpers import GENEROUS_S, OWN_RUN, async_until
from tests.learner.support import make_config, write_model
from tests.network.support import made, server_of
from tests.replay.support import ReplayThread
from tests.weights.fakes import HoldingEngine, following, publisher, route, same_bits, shapes, some_tensors

EXPECTED = shapes(some_tensors())
OTHERS = [RunIdentity("other", OWN_RUN.id), RunIdentity("other"), RunIdentity(OWN_RUN.name, "another")]


@pytest.mark.parametrize("other", OTHERS, ids=str)
async def test_an_engine_of_another_run_gets_no_weights_and_reads_both_names_while_the_own_ones_are_served(
    context, other, caplog
):
    own, away, stranger = HoldingEngine(), HoldingEngine(), HoldingEngine()
    with publisher(context, run=OWN_RUN) as source:
        source.publish(0, some_tensors(0))
        async with (
            route(source.endpoint, run=other) as wrong,
            route(source.endpoint, run=OWN_RUN) as right,
            route(source.endpoint, run=RunIdentity(OWN_RUN.name)) as by_name,
            following(wrong, stranger, EXPECTED) as refused,
            following(right, own, EXPECTED),
            following(by_name, away, EXPECTED),
        ):
            await async_until(lambda: own.version == away.version == 0 and refused.refused >= 2)
            source.publish(1, some_tensors(1))
            await async_until(lambda: own.version == away.version == 1 and refused.refused >= 4)
        assert source.refused >= 4
    assert same_bits(own.tensors, some_tensors(1))
    assert (stranger.version, stranger.served) == (-1, [])
    told = f"this is the weight publisher of run {OWN_RUN}, not of {other}: check network.host, network.weights_port"
    assert any(told in each.getMessage() for each in caplog.records if each.name.endswith("receiver"))


@pytest.mark.parametrize("other", OTHERS, ids=str)
async def test_an_engine_of_another_run_is_called_to_no_broadcast(context, other):
    with publisher(context, run=OWN_RUN) as source:
        requests = Requests(source.endpoint, zmq.asyncio.Context.shadow(context), run=other)
        link = DistributedRoute(requests, torch.device("cpu"), 20.0)
        with pytest.raises(WireError, match=re.escape(f"of run {OWN_RUN}, not of {other}")):
            await link.newer_than(-1)
        assert source.call("gloo", lambda receivers: {}, 0.0) == ()
        link.reset()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("manifest", {"holds": -1, "base": ""}),
        ("join", {"holds": -1, "backend": "gloo", "gpu": ""}),
        ("chunk", {"version": 0, "start": 0, "stop": 8}),
    ],
)
@pytest.mark.parametrize("said", [{}, {"run": "run"}, {"run": ["run"]}, {"run": ["run", 1]}, {"run": None}], ids=str)
async def test_a_request_for_weights_that_does_not_say_its_run_is_refused(context, kind, body, said):
    with publisher(context, run=OWN_RUN) as source:
        requests = Requests(source.endpoint, zmq.asyncio.Context.shadow(context))
        with pytest.raises(WireError, match=f"'{kind}' names no run"):
            await requests.ask(kind, {**body, **said})
        requests.reset()


@pytest.mark.slow
async def test_a_request_over_a_connection_that_was_refused_ends_in_time(tmp_path):
    with zmq.asyncio.Context() as context, zmq.Context() as other:
        locked = Listener(other, "tcp://127.0.0.1:*", server_of(made(tmp_path / "keys")), 1 << 20)
        requests = Requests(locked.endpoint, context, timeout_s=0.1)
        for _ in range(4):
            with pytest.raises(UnavailableError, match="has been silent for"):
                await requests.ask("manifest", {})
        requests.reset()
        locked.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["another name", *(pytest.param(each, marks=pytest.mark.heavy) for each in ("another folder", "none"))]
)
def test_a_configured_actor_takes_the_weights_of_its_own_runs_learner_only(tmp_path, mistake):
    """Through the configuration at both ends: a learner as it runs, and an actor's routes."""
    config = make_config(write_model(tmp_path / "model", layers=1), tmp_path)
    port = free_ports(2)
    config.network.replay_port, config.network.weights_port = port, port + 1
    config.weights.to_engines = "zmq"
    theirs = TrainConfig(network=config.network, run=config.run, weights=config.weights)
    if mistake != "none":
        theirs.run = type(config.run)(
            name="mine" if mistake == "another name" else config.run.name,
            dir=str(tmp_path / "mine") if mistake == "another folder" else config.run.dir,
        )
        locations.run_identity(theirs.run, make=True)
    locations.run_identity(config.run, make=True)
    stop = threading.Event()

    async def ask():
        [link, *_] = open_routes(theirs, None)
        try:
            while (manifest := await link.newer_than(-1)) is None:
                pass
            return manifest
        finally:
            link.reset()

    def actor():
        try:
            return asyncio.run(ask())
        finally:
            stop.set()

    endpoint = f"tcp://127.0.0.1:{config.network.replay_port}"
    with (
        ReplayThread(tmp_path / "store", run=locations.run_identity(config.run), endpoint=endpoint),
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(actor)
        with pytest.raises(StoppedError):
            learn(config, stop, Activity(), GENEROUS_S)
        if mistake == "none":
            assert asked.result().version == 0
        else:
            ours, other = locations.run_identity(config.run), locations.run_identity(theirs.run)
            with pytest.raises(WireError, match=re.escape(f"of run {ours}, not of {other}")):
                asked.result()
