"""The buffer that a server keeps open, and the choice between it and buckets. Only the loader of the server is real."""

from __future__ import annotations

import base64
import json
import logging
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncrl.engine.fleet.http import Http
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.fleet.update import CPU, Update
from asyncrl.engine.sglang.inside import LOADER
from asyncrl.engine.sglang.inside.asyncrl_loader import load
from asyncrl.engine.sglang.routes import ipc, kept
from asyncrl.engine.sglang.routes.base import ServerEnd
from asyncrl.engine.sglang.routes.ipc import IpcServerRoute
from asyncrl.engine.sglang.routes.kept import reason_to_keep_none, whole_bucket
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.weights.folders import read_folder, write_folder
from tests.engine.fleet.fakes import FakeSglang, serving
from tests.weights.fakes import some_tensors

GPU = torch.device("cuda", 1)
KEEPS = {"custom_weight_loader": [LOADER]}


class Handle:
    """A stub of a handle of memory: in this process it gives the memory itself. The class counts open handles."""

    buffers: list[torch.Tensor]
    open: int

    def __init__(self, flat: torch.Tensor) -> None:
        self._index = len(Handle.buffers)
        Handle.buffers.append(flat)
        Handle.open += 1

    def __reduce__(self) -> Any:
        return opened, (self._index,)

    def release(self) -> None:
        Handle.open -= 1


def opened(index: int) -> torch.Tensor:
    return Handle.buffers[index]


class Model(torch.nn.Module):
    """A server's model, with the tensors of a push by their names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))

    def load_weights(self, given: Any) -> None:
        for name, tensor in given:
            getattr(self, name).copy_(tensor)


class Server:
    """A server at whose end the route `ipc` loads weights. `fails` are the next calls that fail."""

    def __init__(self, keeps_none: str = "") -> None:
        http = cast(Http, SimpleNamespace(post=self._post))
        self.end = replace(ServerEnd("http://127.0.0.1:1", http, 1.0), keeps_none=keeps_none)
        self.route = IpcServerRoute(self.end, CPU, bucket_bytes=1 << 20)
        self.model = Model(weights(0))
        self.bodies: list[Any] = []
        self.fails = 0

    async def _post(self, path: str, body: Any, timeout_s: float) -> None:
        assert path == "/update_weights_from_tensor"
        self.bodies.append(body)
        if self.fails:
            self.fails -= 1
            raise ServerFaultError("gone")
        [message] = body["serialized_named_tensors"]
        if body["load_format"] == LOADER:
            load(self.model, pickle.loads(base64.b64decode(message)))  # noqa: S301

    async def push(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        update = Update(version, f"{version}-me", weights(version) if tensors is None else tensors)
        await self.route.prepare(update)
        await self.route.send(update)

    @property
    def said(self) -> Any:
        """The loader's message in the last body."""
        [message] = self.bodies[-1]["serialized_named_tensors"]
        [(text, _)] = pickle.loads(base64.b64decode(message))  # noqa: S301
        return json.loads(text)

    def serves(self, version: int) -> bool:
        return all(torch.equal(getattr(self.model, name), each) for name, each in weights(version).items())


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), float(version)), "b": torch.full((5,), version, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Handle.buffers, Handle.open = [], 0
    monkeypatch.setattr(kept, "Handle", Handle)
    have_room(1 << 30, monkeypatch)


def have_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


async def test_the_first_push_has_a_handle_and_the_layout_and_each_later_one_only_the_key():
    server = Server()
    for version in (1, 2, 3):
        await server.push(version)
        assert server.serves(version)
        assert server.said.keys() == ({"key", "tensors"} if version == 1 else {"key"})
        assert server.bodies[-1]["weight_version"] == f"{version}-me"
        assert not server.bodies[-1]["flush_cache"]
    assert (len(server.bodies), len(Handle.buffers)) == (3, 1)
    await server.route.reset()
    assert Handle.open == 0


async def test_a_version_waits_in_the_buffer_before_the_server_stops():
    server = Server()
    update = Update(1, "1-me", weights(1))
    await server.route.prepare(update)
    assert not server.bodies
    update._weights = {}
    await server.route.send(update)
    assert server.serves(1)


async def test_an_update_that_was_not_prepared_is_prepared_when_it_is_sent():
    """So it is if another route has refused the update."""
    server = Server()
    await server.route.send(Update(1, "1-me", weights(1)))
    assert server.serves(1)


async def test_a_failed_push_frees_the_buffer_and_the_next_one_has_another_handle():
    server = Server()
    await server.push(1)
    server.fails = 1
    with pytest.raises(ServerFaultError):
        await server.push(2)
    assert Handle.open == 0
    await server.push(3)
    assert server.serves(3)
    assert "tensors" in server.said
    assert (len(Handle.buffers), Handle.open) == (2, 1)


async def test_a_server_that_joins_again_gets_another_buffer():
    server = Server()
    await server.push(1)
    await server.route.reset()
    server.model = Model(weights(0))
    await server.push(2)
    assert server.serves(2)
    assert len(Handle.buffers) == 2


async def test_a_version_in_a_folder_goes_through_the_same_buffer_although_its_checksums_differ(tmp_path: Path):
    buckets = []
    for version in (1, 2):
        folder = read_folder(write_folder(tmp_path, version, some_tensors(version), lambda _: None), version)
        buckets.append(whole_bucket(Update(version, "me", folder).specs))
    assert buckets[0] == buckets[1]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (KEEPS, ""),
        ({**KEEPS, "tp_size": 1, "enable_memory_saver": False}, ""),
        ({}, "without --custom-weight-loader asyncrl_loader.load"),
        ({"custom_weight_loader": None}, "without --custom-weight-loader"),
        ({"custom_weight_loader": ["mine.load"]}, "without --custom-weight-loader"),
        ({**KEEPS, "tp_size": 2}, "several GPUs"),
        ({**KEEPS, "dp_size": 2}, "several GPUs"),
        ({**KEEPS, "enable_memory_saver": True}, "in turns"),
    ],
)
def test_a_server_keeps_a_buffer_only_if_it_can_and_its_gpu_is_its_own(info: dict[str, Any], reason: str):
    found = reason_to_keep_none(info)
    assert reason in found
    assert bool(found) == bool(reason)


async def test_a_server_that_keeps_none_gets_buckets_and_the_log_says_why_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ipc, "shared", lambda flat, ranks: nullcontext())
    monkeypatch.setattr(ipc, "handles_of", lambda bucket, buffers: ["a pickle"])
    server = Server("the server has several GPUs")
    for version in (1, 2):
        await server.push(version)
        assert server.bodies[-1]["load_format"] == "flattened_bucket"
    assert caplog.text.count("in buckets, and are loaded by name: the server has several GPUs") == 1


def test_a_buffer_needs_room_for_another_copy_and_the_reserve_until_the_server_has_opened_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    end = replace(Server().end, keeps_none="")
    route = IpcServerRoute(end, GPU, bucket_bytes=1 << 20, reserve_bytes=4 << 20)
    whole = whole_bucket(Update(1, "1-me", {"a": torch.empty(3 << 20, dtype=torch.uint8)}).specs)
    have_room(10 << 20, monkeypatch)
    assert route._fits_whole(whole)
    have_room((10 << 20) - 1, monkeypatch)
    assert not route._fits_whole(whole)
    assert "cuda:1 has 9 MB free, and 10 are needed for a kept buffer" in caplog.text
    route._kept._bucket = whole
    assert route._fits_whole(whole)


@pytest.mark.slow
async def test_a_server_that_was_restarted_is_found_out_before_a_push_refers_to_its_buffer(tmp_path: Path):
    fake = FakeSglang()

    async def info(body: Any) -> Any:
        return {"version": "0.5.23", "tp_size": 1, **KEEPS}

    fake.answers["server_info"] = info
    async with serving(fake):
        server = SglangServer(fake.url, context=100)
        await server.join()
        server._routes = {"ipc": Server().route}
        update = Update(1, "1-me", weights(1))
        await server.prepare(update)
        await server.load(update)
        fake.label = update.label
        await server.prepare(Update(2, "2-me", weights(2)))
        fake.restart()
        with pytest.raises(ServerFaultError, match="has weights 'default', not '1-me'"):
            await server.prepare(Update(3, "3-me", weights(3)))
        await server.close()
