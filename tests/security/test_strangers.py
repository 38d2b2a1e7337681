"""Replay and weight publisher, as processes with keys: who has the right ones is served, all others get nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from asyncrl.data.writing import write_tasks
from asyncrl.errors import UnavailableError, WireError
from asyncrl.network.keys import ClientKeys, add_client
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.messages import decode_reply
from asyncrl.weights.requests import Requests
from asyncrl.weights.zmq_route import ZmqRoute
from asyncrl.wire import PROTOCOL
from tests.chaos.support import ReplayProcess
from tests.helpers import GENEROUS_S, OWN_RUN, make_task, make_trajectory, status_of, until
from tests.network.support import client_of, made, peer, strangers
from tests.security.published import PublisherProcess, tensors

pytestmark = pytest.mark.slow

GROUPS = ("learner.group_size=2", "learner.batch_size=4")
WHO = ["no keys", "another server's key", "a key that is not in the list", "the keys of another run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


@pytest.fixture(scope="module")
def keys(folder: Path) -> Path:
    return made(folder / "keys")


@pytest.fixture(scope="module")
def everyone(folder: Path, keys: Path) -> dict[str, ClientKeys | None]:
    return strangers(keys, made(folder / "others"))


@pytest.fixture(scope="module")
def closed(folder: Path, keys: Path) -> Iterator[ReplayProcess]:
    with ReplayProcess(folder / "closed", *GROUPS, f"network.keys={keys}") as target:
        yield target


@pytest.fixture(scope="module")
def closed_publisher(folder: Path, keys: Path) -> Iterator[PublisherProcess]:
    with PublisherProcess(folder / "weights", keys) as target:
        yield target


@pytest.mark.parametrize("who", WHO)
def test_a_stranger_gets_nothing_from_the_replay_while_a_client_is_served(
    closed: ReplayProcess, keys: Path, everyone: dict[str, ClientKeys | None], who: str
) -> None:
    with zmq.Context() as context:
        client = closed.client(context=context, keys=client_of(keys))
        before = client.status()
        stranger = closed.client("x", context=context, keys=everyone[who], give_up_s=0.3)
        with pytest.raises(UnavailableError):
            stranger.tickets([], 1)
        after = client.status()
        stranger.close()
        until(lambda: client.status()["failed_handshakes"] > before["failed_handshakes"])
        assert [after[name] for name in COUNTERS] == [before[name] for name in COUNTERS]
        ticket = client.tickets([], 1)[0]
        assert client.put(make_trajectory(ticket)) == "stored"
        client.close()
    closed.wait_for_log("a client was refused")


@pytest.mark.parametrize("who", WHO)
def test_a_stranger_gets_no_weights_while_a_receiver_is_served(
    closed_publisher: PublisherProcess, keys: Path, everyone: dict[str, ClientKeys | None], who: str
) -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        receiver = ZmqRoute(Requests(closed_publisher.endpoint, context, keys=client_of(keys), run=OWN_RUN))
        stranger = ZmqRoute(
            Requests(closed_publisher.endpoint, context, keys=everyone[who], timeout_s=0.3, run=OWN_RUN)
        )
        with pytest.raises(UnavailableError, match="allowed" if everyone[who] else "silent"):
            await stranger.newer_than(-1)
        manifest = await receiver.newer_than(-1)
        assert manifest is not None
        got = await receiver.fetch(manifest)
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors().items())
        stranger.reset()
        receiver.reset()
        context.term()

    asyncio.run(run())
    assert closed_publisher.alive()


def test_a_client_on_another_machine_needs_no_secret_of_the_server(closed: ReplayProcess, keys: Path) -> None:
    assert closed.status(keys=client_of(add_client(keys, "gpu7")))["version"] == 0


def test_a_client_that_is_not_heard_tells_its_user_what_to_check(
    closed: ReplayProcess, everyone: dict[str, ClientKeys | None], caplog: pytest.LogCaptureFixture
) -> None:
    strange = everyone["a key that is not in the list"]
    unheard = closed.client("x", keys=strange, give_up_s=1.0, retry_s=0.2)
    with pytest.raises(UnavailableError):
        unheard.status()
    unheard.close()
    assert "is this client in its list `allowed`?" in caplog.text


def test_a_peer_that_sends_more_than_the_limit_is_cut_off_and_the_others_go_on(folder: Path) -> None:
    with ReplayProcess(folder / "small", *GROUPS, "network.max_message_mb=1") as target:
        with peer(target.endpoint, None) as flood:
            flood.send(b"x" * (2 << 20))
            assert target.status()["refused"] == 0
            assert not flood.poll(200)
        with peer(target.endpoint, None) as modest:
            modest.send(b"x" * (1 << 20))
            assert modest.poll(1000 * GENEROUS_S)
            assert decode_reply(modest.recv_multipart()).kind == "refused"
        assert target.status()["refused"] == 1


def test_both_sides_refuse_another_version_naming_both(closed: ReplayProcess, keys: Path) -> None:
    strange = [msgspec.msgpack.encode([99, "status", 1, {}, []])]
    reason = f"protocol 99, this side speaks {PROTOCOL}"
    before = closed.status(keys=client_of(keys))["refused"]
    with peer(closed.endpoint, client_of(keys)) as other:
        other.send_multipart(strange)
        assert other.poll(1000 * GENEROUS_S)
        assert reason in decode_reply(other.recv_multipart()).reason
    assert closed.status(keys=client_of(keys))["refused"] == before + 1
    assert reason in closed.log()
    with pytest.raises(WireError, match=reason):
        decode_reply(strange)


def test_a_replay_that_others_can_reach_does_not_start_without_keys(
    folder: Path, keys: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = folder / "tasks.parquet"
    write_tasks(tasks, [make_task()])
    words = ("model.path=none", f"data.train={tasks}", f"run.dir={folder}", "network.host=0.0.0.0")
    assert status_of("replay", *words) == 2
    refused = capfd.readouterr().err
    assert "asyncrl keys" in refused
    assert "network.insecure=true" in refused
    assert status_of("replay", *words, f"network.keys={keys / 'nowhere'}") == 2
    assert "makes keys" in capfd.readouterr().err
    with ReplayProcess(folder / "reachable", *GROUPS, "network.host=0.0.0.0", f"network.keys={keys}") as target:
        assert target.status(keys=client_of(keys))["refused"] == 0
