"""Sets up benchmarks of generation: a policy in a folder, an SGLang server for it, and asyncrl's fleet over the server.

It needs Hydra and transformers only to start a server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from asyncrl.engine.fleet.discovery import listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.sglang.launch import LaunchedServer, server_command
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.types import RunIdentity


@dataclass(frozen=True)
class Policy:
    """The model in the Hugging Face folder `path`."""

    path: Path

    @classmethod
    def of_one_number(cls, folder: Path, vocabulary: int) -> Policy:
        """Make a policy of one number, for servers that ignore the weights."""
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
        return cls(folder)

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name; tied ones appear once."""
        return {
            name: each for file in sorted(self.path.glob("*.safetensors")) for name, each in load_file(file).items()
        }

    @cached_property
    def vocabulary(self) -> int:
        return int(json.loads((self.path / "config.json").read_text())["vocab_size"])

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.tensors.values())

    def write_config(self, folder: Path) -> None:
        shutil.copy(self.path / "config.json", folder)


@dataclass(frozen=True, slots=True)
class Push:
    """The route of weights into servers: `weights.mode` and `weights.into_servers` of the configuration."""

    mode: str = "abort"
    into_servers: str = "auto"


@dataclass(slots=True)
class OpenFleet:
    """A fleet and its servers, which have version 0.

    `switches` are the seconds of every update of a server, `loads` the seconds of loading the weights. The rest of an
    update is the wait for requests and the flush.
    """

    fleet: Fleet
    servers: list[SglangServer] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


class TimedServer(SglangServer):
    """A server that records the seconds of loading weights in `loads`, and of whole updates in `switches`."""

    loads: list[float]
    switches: list[float]
    _own: int | None = None

    async def prepare(self, update: Update) -> None:
        await super().prepare(update)
        self._prepared = time.perf_counter()

    async def load(self, update: Update) -> None:
        begun = time.perf_counter()
        self._own = len(self.switches)
        self.switches.append(0.0)
        await super().load(update)
        self.loads.append(time.perf_counter() - begun)
        self._note_switch()

    async def flush(self) -> None:
        """Flush the cache, which is part of an update."""
        await super().flush()
        self._note_switch()

    async def resume(self) -> None:
        """Resume the server, at the end of an update with a pause and at every join."""
        await super().resume()
        self._note_switch()

    def _note_switch(self) -> None:
        if self._own is not None:
            self.switches[self._own] = time.perf_counter() - self._prepared


@asynccontextmanager
async def fleet_over(
    urls: Sequence[str], policy: Policy, context: int, push: Push, folder: Path, patience_s: float = 300.0
) -> AsyncIterator[OpenFleet]:
    """Open a fleet over running servers with a context of `context` tokens. They load versions from `folder`.

    Raises TimeoutError: no server loaded the first weights within `patience_s`; the log has the reason.
    """
    settings = ServerRouteSettings(push.into_servers)

    def open_server(url: str) -> SglangServer:
        server = TimedServer(url, context=context, settings=settings)
        server.loads, server.switches = opened.loads, opened.switches
        opened.servers.append(server)
        return server

    fleet = Fleet(
        listed(urls),
        open_server,
        expected={name: tuple(each.shape) for name, each in policy.tensors.items()},
        vocabulary=policy.vocabulary,
        settings=FleetSettings(mode=push.mode),
        folders=Folders(folder, policy.write_config, RunIdentity("benchmark")),
    )
    opened = OpenFleet(fleet)
    keeper = asyncio.create_task(fleet.keep())
    try:
        await asyncio.wait_for(fleet.update_weights(0, policy.tensors), patience_s)
        yield opened
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await fleet.close()


async def server_version(url: str) -> str:
    http = Http(url)
    try:
        return str((await http.get("/get_server_info", 60.0))["version"])
    finally:
        await http.close()


@asynccontextmanager
async def launched(
    python: str,
    model: Path,
    log: Path,
    gpu: int = 0,
    memory: float | None = None,
    arguments: Sequence[str] = (),
    tokenizer: bool = False,
) -> AsyncIterator[str]:
    """Start a server of `model` with `python`, on GPU number `gpu` or without GPUs on the CPU, and yield its URL.

    `memory` is its share of the GPU, and `arguments` are further arguments. With `tokenizer` it makes text of tokens.
    Raises ConfigError: the server does not start.
    """
    from omegaconf import OmegaConf

    from asyncrl.config.files import config_dir
    from asyncrl.config.schema import EngineConfig, ModelConfig
    from asyncrl.machine.ports import free_ports

    kind = "sglang" if torch.cuda.is_available() else "sglang_cpu"
    engine = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(EngineConfig), OmegaConf.load(config_dir() / "engine" / f"{kind}.yaml"))
    )
    assert isinstance(engine, EngineConfig)
    engine.python, engine.server.memory = python, memory
    engine.server.arguments += arguments
    dtype = json.loads((model / "config.json").read_text())["dtype"]
    port = free_ports(1)
    command = server_command(engine, ModelConfig(path=str(model), dtype=dtype), port, gpu)
    command += [] if tokenizer else ["--skip-tokenizer-init"]
    server = LaunchedServer(
        f"http://127.0.0.1:{port}", command, log, engine.server.environment, engine.server.start_s, 0
    )
    keeper = asyncio.create_task(server.keep())
    try:
        while not server.answering and not keeper.done():
            await asyncio.sleep(0.1)
        if keeper.done():
            keeper.result()
        yield server.url
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
