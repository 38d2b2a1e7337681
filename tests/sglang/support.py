"""Tiny models, real servers over them, and the forward pass that they are held against."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.actor.engine.fleet.discovery import Discovery, listed
from asyncrl.actor.engine.fleet.fleet import Fleet, Rules
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.actor.engine.fleet.http import Http
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.switch import Switcher
from asyncrl.actor.engine.sglang.server import SglangServer
from asyncrl.errors import EngineError
from asyncrl.launch.child import kill_group, last_lines, start_guarded
from asyncrl.launch.local import free_ports
from tests.actor.engine.support import VOCABULARY, parameters, tiny_model
from tests.actor.fakes import make_tokenizer

CONTEXT = 2048
ARGUMENTS = ["--device", "cpu", "--disable-overlap-schedule", "--max-total-tokens", "32768", "--sleep-on-idle"]
ARGUMENTS += ["--mem-fraction-static", "0.2", "--dtype", "float32", "--host", "127.0.0.1", "--skip-server-warmup"]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
STOP_ID = 3


def policy(seed: int) -> Any:
    """The policy of version `seed`. Its vocabulary is that of the tokenizer, which the server reads as well."""
    return tiny_model(
        seed,
        vocab_size=max(VOCABULARY, len(make_tokenizer())),
        max_position_embeddings=CONTEXT,
        head_dim=32,
        hidden_size=64,
        eos_token_id=STOP_ID,
        initializer_range=0.1,
    )


def save_policy(folder: Path) -> Path:
    """As a Hugging Face folder; its weights are those of no version, so that a forgotten update shows."""
    policy(1000).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


class RealServer:
    """A server process that can be killed and started again at the same address."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self._model = model
        self._arguments = arguments
        self._log = log
        self._port = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        python = os.environ["ASYNCRL_SGLANG_PYTHON"]
        command = [python, "-m", "sglang.launch_server", "--model-path", str(self._model), "--port", str(self._port)]

        return start_guarded([*command, *ARGUMENTS, *self._arguments], self._log, ENVIRONMENT)

    async def ready(self) -> None:
        http = Http(self.url)
        while True:
            assert self.process.poll() is None, last_lines(self._log, 30)
            try:
                await http.get("/get_model_info", 60)
                break
            except EngineError:
                await asyncio.sleep(0.2)
        await http.close()

    def kill(self) -> None:
        kill_group(self.process)

    def restart(self) -> None:
        self.process = self._start()


def run(scenario: Callable[[], Awaitable[Any]], seconds: float = 600) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), seconds))


async def servers_ready(fleet: Fleet, count: int) -> None:
    while fleet.stats().counters["servers_ready"] != count:
        await asyncio.sleep(0.001)


def prompts(count: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 200, int(length)).astype(np.int32) for length in rng.integers(5, 60, count)]


def folders(directory: Path) -> Folders:
    return Folders(directory, policy(0).config.save_pretrained)


@asynccontextmanager
async def fleet_of(
    servers: Sequence[str] | Discovery,
    mode: str = "retract",
    transports: Sequence[str] = ("tensor",),
    segment_tokens: int = 0,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """A fleet over `servers`, kept until the end."""
    changed = Signal()
    salted = mode == "in_place"
    fleet = Fleet(
        servers if callable(servers) else listed(servers),
        lambda url: SglangServer(url, context=512, transports=transports, silence_s=30, bucket_bytes=64 << 10),
        Switcher(mode, not salted, 60.0, changed),
        changed,
        expected={name: tuple(tensor.shape) for name, tensor in parameters(policy(0)).items()},
        vocabulary=policy(0).config.vocab_size,
        rules=Rules(check_s=0.5, wait_s=120, salted=salted, segment_tokens=segment_tokens),
        **options,
    )
    keeper = asyncio.create_task(fleet.keep())
    try:
        yield fleet
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await fleet.close()
