"""Starts an SGLang server for an actor, restarts it if it dies or hangs, and ends it when the actor ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.sglang.fitting import FRACTION
from asyncrl.engine.sglang.inside import FOLDER
from asyncrl.engine.sglang.load import LoadWatch, ServerLoad
from asyncrl.errors import ConfigError, EngineError
from asyncrl.machine.child import group_has_ended, kill_group_soon, last_lines, start_guarded
from asyncrl.masking import masked
from asyncrl.modelling.opening import server_overrides
from asyncrl.modelling.source import source_of
from asyncrl.modelling.tokenizer import tokenizer_source

if TYPE_CHECKING:
    from asyncrl.config.schema import EngineConfig, ModelConfig, ServerConfig

logger = logging.getLogger(__name__)

OWN_VARIABLES: Mapping[str, str] = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""Variables of a server's environment. SGLang 0.5.23 caches the features of images by their pixels. Cached features
would stay when the weights of the vision tower change, so the cache gets a size of 0."""
OVERRIDES_FLAG = "--json-model-override-args"
POLL_S = 0.25
STOP_S = 1.0
"""The seconds between a SIGTERM and the kill of a server that is still alive."""
ENDED_POLL_S = 0.02
SILENCES, MOST_SILENCES = 3, 24
"""A server counts as hanging if it gives no answer in time `SILENCES` times in a row. After each hang this number
doubles, up to `MOST_SILENCES`, since the server may only be busy for a long time after each start."""
KILLED_S = 30.0
"""The longest wait in seconds for killed processes to end: a process that hangs in the kernel may never end."""


def server_count(server: ServerConfig) -> int:
    """The number of servers that an actor starts on the GPUs that it sees."""
    if server.count is not None:
        return server.count
    return max(1, torch.cuda.device_count() // server.tp_size) * server.together


def memory_share(server: ServerConfig, index: int) -> float | None:
    """The share of a GPU's memory that server number `index` and the other servers on its GPU may use; `None`: as much
    as SGLang takes."""
    return server.memory if index in server.shared or not server.shared else None


def server_command(
    engine: EngineConfig,
    model: ModelConfig,
    port: int,
    index: int,
    *,
    seed: int = 0,
    shares_gpus: bool = False,
    fitting: Sequence[str] = (),
) -> list[str]:
    """The command line of the actor's server number `index`. `shares_gpus`: the learner uses the server's GPUs, too.
    `fitting`: the arguments that fit the server to the run (see fitting.py)."""
    server = engine.server
    source = source_of(model)
    command = [engine.python, "-m", "sglang.launch_server", "--model-path", source.path, "--dtype", model.dtype]
    if source.revision is not None:
        command += ["--revision", source.revision]
    command += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed + index)]
    command += ["--tp-size", str(server.tp_size), "--base-gpu-id", str(server.first_gpu(index))]
    command += ["--sleep-on-idle"]
    if server.together == 1 and (memory := memory_share(server, index)) is not None:
        command += [FRACTION, str(memory)]
    if engine.return_routed_experts:
        command += ["--enable-return-routed-experts"]
    if model.tokenizer is not None:
        command += ["--tokenizer-path", tokenizer_source(model).path]
    if model.trust_remote_code:
        command += ["--trust-remote-code"]
    if overrides := server_overrides(model):
        command += [OVERRIDES_FLAG, json.dumps(overrides)]
    if shares_gpus and not server.on_cpu:
        command += ["--enable-memory-saver"]
    return [*command, *fitting, *server.arguments]


def _environment(given: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a server to which the user gave these variables."""
    paths = given.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    python_path = str(FOLDER) if not paths else os.pathsep.join((str(FOLDER), paths))
    return {**given, **OWN_VARIABLES, "PYTHONPATH": python_path}


class LaunchedServer:
    """The server at `url` that `command` starts, with its output in `log`.

    The server must answer within `start_s` seconds. After its first successful start, `max_failures` starts in a row
    may fail. With `sharing` it is started only while the servers have the shared GPUs.
    """

    def __init__(
        self,
        url: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        start_s: float,
        max_failures: int,
        sharing: GpuSharing | None = None,
    ) -> None:
        self.url = url
        self.starts = 0
        self.hangs = 0
        self.answering = False
        self.freed = False
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._log = log
        self._environment = environment
        self._start_s = start_s
        self._max_failures = max_failures
        self._was_killed = False
        self._joined_start = 0
        self._silences = 0
        self._sharing = sharing
        self._watch = LoadWatch(log, self._pid, time.monotonic)
        if sharing is not None:
            sharing.add(self)

    @property
    def running(self) -> bool:
        """True if there is a process."""
        return self.process is not None

    def load(self) -> ServerLoad:
        """The load of the server since the last call."""
        return self._watch.look()

    def _pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def end(self) -> None:
        """Kill the process, if there is one. `keep` then starts another one."""
        if self.process is not None:
            kill_group_soon(self.process)

    def heard(self, joined: bool) -> None:
        """Record that the server joined the fleet, or gave no answer in time. A server that hangs is killed, and `keep`
        then starts another one. A process that has not joined yet never counts as hanging: its start may take long."""
        if joined:
            self._joined_start, self._silences = self.starts, 0
            return
        self._silences += 1
        most = min(SILENCES << self.hangs, MOST_SILENCES)
        if self._joined_start == self.starts and self._silences >= most:
            logger.error("the server at %s has given no answer %d times in a row; it is killed", self.url, most)
            self._joined_start, self.hangs = 0, self.hangs + 1
            self.end()

    async def keep(self) -> None:
        """Keep the server running; returns only by cancellation, and then ends the server.

        If the first process was killed before it answered, it is started again, but only once, since SGLang also kills
        itself if it cannot start. Raises ConfigError: the server never started. EngineError: the server has run, but
        does not start again.
        """
        has_run, failures = False, 0
        try:
            while True:
                if await self._run_once():
                    has_run, failures = True, 0
                    logger.warning("the server at %s ended; starting it again", self.url)
                    continue
                failures += 1
                reason = f"the server at {self.url} does not start; the end of its log:\n{last_lines(self._log)}"
                if not has_run and self._was_killed and failures == 1:
                    logger.warning("the server at %s was killed before it answered; starting it again", self.url)
                    continue
                if not has_run:
                    raise ConfigError(f"{reason}\nCheck engine.python and engine.server")
                if failures > self._max_failures:
                    raise EngineError(reason)
        finally:
            await self._stop()

    async def _run_once(self) -> bool:
        """Run one process until it ends. True if the server answered before the process ended."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if shutil.which(self._command[0]) is None:
            raise ConfigError(f"engine.python={self._command[0]}: there is no such program")
        files: Sequence[int] = ()
        if self._sharing is not None:
            await self._sharing.begun()
            files = [self._sharing.lock.file]
        logger.info(
            "starting the server at %s; its log is %s; CUDA_VISIBLE_DEVICES=%s; %s",
            *(self.url, self._log, os.environ.get("CUDA_VISIBLE_DEVICES", "")),
            shlex.join(masked(self._command)),
        )
        self.process, self.freed = (
            start_guarded(self._command, self._log, _environment(self._environment), files),
            False,
        )
        self.starts += 1
        answered = self.answering = await self._answers(self.process)
        self._was_killed = self.process.poll() == -signal.SIGKILL
        while answered and self.process.poll() is None:
            await asyncio.sleep(POLL_S)
        await self._stop()
        return answered

    async def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        """True if the server answers in time, and before its process ends."""
        http = Http(self.url)
        try:
            async with asyncio.timeout(self._start_s):
                while process.poll() is None:
                    with suppress(EngineError):
                        await http.get("/get_model_info", self._start_s)
                        return True
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logger.error("the server at %s did not answer within %g s", self.url, self._start_s)
        finally:
            await http.close()
        return False

    async def _stop(self) -> None:
        self.answering = False
        process = self.process
        if process is None:
            return
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while process.poll() is None:
                    await asyncio.sleep(ENDED_POLL_S)
        # This call does not wait, so that all servers end at the same time.
        kill_group_soon(process)
        # A process counts as running while it holds memory of GPUs, which the learner or the next process needs.
        with suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                while process.poll() is None or not group_has_ended(process.pid):
                    await asyncio.sleep(ENDED_POLL_S)
        if process.stdin is not None:
            process.stdin.close()
        self.process = None
