"""Handles of GPU memory as they are posted, read as a server's unpickler reads them.

Except for the last two tests no GPU is needed: the memory of a handle is a stub, with the arguments that torch gives.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.multiprocessing import reductions

from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.fleet.update import CPU, Update
from asyncrl.engine.sglang.routes import base, handles, ipc
from asyncrl.engine.sglang.routes.base import ServerEnd
from asyncrl.weights.buckets import Bucket, flatten, tight_buckets
from asyncrl.weights.manifest import specs_of
from tests.helpers import GENEROUS_S, until

UUID = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"
TENSORS = {
    "half": torch.arange(3, dtype=torch.bfloat16),
    "whole": torch.arange(6.0).view(2, 3),
    "none": torch.zeros(0, 4),
}
ALLOWED = {
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch", "Tensor"),
    ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("types", "SimpleNamespace"),
}
"""The globals that a body may need, of those that SGLang 0.5.23 accepts; 0.5.17 accepts them by their modules."""


@pytest.fixture
def bucket() -> Bucket:
    [bucket] = tight_buckets(specs_of(TENSORS), 1 << 20)
    return bucket


def have_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room - 4, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4)


@pytest.fixture
def memory(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A buffer that torch believes to be on GPU 5."""
    flat = flatten(bucket, TENSORS)

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        shape = (torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype)
        return reductions.rebuild_cuda_tensor, (
            *shape,
            5,
            b"handle",
            tensor.nbytes,
            64,
            False,
            b"refs",
            8,
            b"event",
            True,
        )

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"{UUID}-{device}"))
    have_room(1 << 30, monkeypatch)
    return flat


class Unpickler(pickle.Unpickler):
    """Takes known names only; the rebuild function is the server's, which gives the memory of this process."""

    def __init__(self, data: bytes, rebuild: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._rebuild = rebuild

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED, f"{module}.{name} is refused by a server"
        return self._rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def test_a_server_finds_every_tensor_behind_the_handle_of_a_gpu_that_it_knows_by_its_uuid(bucket, memory):
    def rebuild(*arguments: Any) -> torch.Tensor:
        assert len(arguments) == 15
        assert arguments[handles.DEVICE : handles.DEVICE + 2] == (f"{UUID}-5", b"handle")
        assert arguments[1] == memory.size()
        return memory

    with handles.shared(memory, 2) as buffers:
        payloads = handles.handles_of(bucket, buffers)
    assert len(payloads) == 2
    for each in payloads:
        loaded = Unpickler(base64.b64decode(each), rebuild).load()
        found = {}
        for meta in loaded["metadata"]:
            assert meta.end_idx - meta.start_idx == meta.numel
            part = loaded["flattened_tensor"][meta.start_idx : meta.end_idx]
            found[meta.name] = part.view(meta.dtype).reshape(meta.shape) if len(part) else torch.zeros(meta.shape)
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.fixture
def counted(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of three buckets that are sent, one after the other, to a server of two ranks."""
    events: list[str] = []
    handed = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        events.append("shared")
        return handed(tensor)

    def release(handle: bytes, offset: int) -> None:
        assert (handle, offset) == (b"refs", 8)
        events.append("released")

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", release)
    return events


def send_three(events: list[str], answers: list[BaseException | None]) -> None:
    """Send three buckets, whose posts end so."""

    async def post(path: str, body: Any, timeout_s: float) -> None:
        events.append("posted")
        if (answer := answers.pop(0)) is not None:
            raise answer

    end = ServerEnd("http://127.0.0.1:1", cast(Http, SimpleNamespace(post=post)), 1.0, ranks=2)
    route = ipc.IpcServerRoute(end, CPU, bucket_bytes=24)
    asyncio.run(route.send(Update(1, "1-me", {name: torch.arange(6.0) for name in "abc"})))


def test_a_bucket_is_shared_with_each_rank_just_before_its_post(counted):
    send_three(counted, [None, None, None])
    assert counted == ["shared", "shared", "posted"] * 3


def test_a_later_bucket_without_room_has_the_weights_go_another_way(counted, monkeypatch: pytest.MonkeyPatch):
    """The first bucket was full before the server stopped."""
    made = iter("ab")

    def full(*arguments: Any) -> torch.Tensor:
        if next(made, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return flatten(*arguments)

    monkeypatch.setattr(base, "flatten", full)
    with pytest.raises(ServerRefusedError, match="has no room for a bucket: CUDA out of memory"):
        send_three(counted, [None, None, None])
    assert counted == ["shared", "shared", "posted"] * 2


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(("room", "source"), [(248 + 144, GPU), (248 + 143, CPU), (192, CPU), (191, None)])
async def test_a_version_waits_on_the_gpu_where_it_has_room_else_on_the_host_and_two_buckets_are_needed(
    room: int, source: torch.device | None, monkeypatch: pytest.MonkeyPatch
):
    """A version has 72 bytes, and two of them may wait. Two buckets have 48, a quarter of what is free."""
    have_room(room, monkeypatch)
    end = ServerEnd("http://127.0.0.1:1", cast(Http, SimpleNamespace()), 1.0)
    route = ipc.IpcServerRoute(end, GPU, bucket_bytes=24, reserve_bytes=200)
    update = Update(1, "1-me", {name: torch.arange(6.0) for name in "abc"})
    if source is None:
        with pytest.raises(ServerRefusedError, match="weights may take"):
            await route.source(update)
    else:
        assert await route.source(update) == source


@pytest.mark.parametrize(
    ("sizes", "needed"), [([6, 30, 6], 144), ([30, 30], 240), ([6, 6, 6], 48), ([6], 24), ([2, 2, 2], 24)]
)
async def test_as_much_room_is_asked_for_as_the_two_largest_neighbours_among_the_buckets_take(
    sizes: list[int], needed: int, monkeypatch: pytest.MonkeyPatch
):
    """A tensor that is larger than a bucket has one of its own size, and a small model needs less than two."""
    end = ServerEnd("http://127.0.0.1:1", cast(Http, SimpleNamespace()), 1.0)
    route = ipc.IpcServerRoute(end, GPU, bucket_bytes=24)
    update = Update(1, "1-me", {str(index): torch.zeros(size) for index, size in enumerate(sizes)})
    have_room(needed, monkeypatch)
    assert await route.source(update) == CPU
    have_room(needed - 1, monkeypatch)
    with pytest.raises(ServerRefusedError, match="weights may take"):
        await route.source(update)


@pytest.mark.parametrize(
    ("room_mb", "buckets_mb"),
    [(1536, [384]), (1535, [128] * 3), (1023, [64] * 6), (512, [64] * 6), (511, None)],
)
def test_buckets_are_as_large_as_fit_into_a_quarter_of_what_is_free_beside_a_learner(
    room_mb: int, buckets_mb: list[int] | None, monkeypatch: pytest.MonkeyPatch
):
    """A server and a learner on one GPU leave some GB, which both may need."""
    have_room(room_mb << 20, monkeypatch)
    end = ServerEnd("http://127.0.0.1:1", cast(Http, SimpleNamespace()), 1.0)
    route = ipc.IpcServerRoute(end, GPU, bucket_bytes=512 << 20, reserve_bytes=4 << 30)
    tensor = torch.empty(32 << 20, dtype=torch.uint8, device="meta")
    update = Update(1, "1-me", {str(index): tensor for index in range(12)})
    if buckets_mb is None:
        with pytest.raises(ServerRefusedError, match="511 MB free, of which weights may take 127, and 128 are needed"):
            route.plan(update)
    else:
        assert [bucket.nbytes >> 20 for bucket in route.plan(update)] == buckets_mb


@pytest.mark.parametrize("error", [ServerFaultError("gone"), ServerRefusedError("no"), asyncio.CancelledError()])
def test_what_a_failed_post_shared_is_released_since_the_server_may_never_open_it(counted, error):
    with pytest.raises(type(error)):
        send_three(counted, [None, error])
    assert counted == [*["shared", "shared", "posted"] * 2, "released", "released"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keeps_none", ["", "it has not joined"])
def test_failed_posts_leave_nothing_on_the_gpu(keeps_none: str):
    tensors = {name: torch.ones(1 << 20, device="cuda") for name in "abc"}

    async def send() -> None:
        http = Http("http://127.0.0.1:1")
        route = ipc.IpcServerRoute(
            ServerEnd("http://127.0.0.1:1", http, 5.0, ranks=2, keeps_none=keeps_none),
            torch.device("cuda", 0),
            bucket_bytes=4 << 20,
        )
        with pytest.raises(ServerFaultError):
            await route.send(Update(1, "1-me", tensors))
        await http.close()

    before = torch.cuda.memory_allocated()
    for _ in range(3):
        asyncio.run(send())
        # The thread that was to make the next bucket may still be at it.
        until(lambda: torch.cuda.memory_allocated() == before)


READER = """
import pickle, sys, torch
rebuild, arguments = pickle.load(sys.stdin.buffer)
flat = rebuild(*arguments[:6], torch.cuda.current_device(), *arguments[7:])
print(int(flat.sum()), flush=True)
sys.stdin.buffer.read()
del flat
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_buffer_that_is_dropped_here_stays_until_its_reader_has_let_go():
    gc.collect()  # What other tests have left would be freed while this one counts.
    torch.cuda.ipc_collect()
    flat = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with handles.shared(flat, 1) as [buffer]:
        pickle.dump(buffer.__reduce__(), reader.stdin)
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == 1 << 20
    del flat
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    reader.stdin.close()
    assert reader.wait(GENEROUS_S) == 0
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before - (1 << 20)


REAL = """
import base64, sys
from torch.multiprocessing import reductions
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
assert reductions.rebuild_cuda_tensor is not reductions._rebuild_cuda_tensor_original
import sglang.srt.utils.patch_torch as patch
patch._device_from_maybe_uuid = lambda device: sys.exit(f"not a uuid: {device}") if type(device) is not str else 0
seen = []
reductions._rebuild_cuda_tensor_original = lambda *arguments: seen.append(arguments)
loaded = MultiprocessingSerializer.deserialize(sys.stdin.read())
assert seen[0][6] == 0 and seen[0][7] == b"handle", seen
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
for meta in loaded["metadata"]:
    FlattenedTensorMetadata(meta.name, meta.shape, meta.dtype, meta.start_idx, meta.end_idx, meta.numel)
print([meta.name for meta in loaded["metadata"]])
"""


@pytest.mark.skipif("ASYNCRL_SGLANG_PYTHON" not in os.environ, reason="needs a Python that has SGLang")
def test_the_unpickler_of_the_real_sglang_takes_it(bucket, memory):
    with handles.shared(memory, 1) as buffers:
        [payload] = handles.handles_of(bucket, buffers)
    command = [os.environ["ASYNCRL_SGLANG_PYTHON"], "-c", REAL]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(command, input=payload, capture_output=True, text=True, env=environment, timeout=GENEROUS_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("['whole', 'none', 'half']")
