"""Real SGLang servers, and a fleet over them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from asyncrl.engine.fleet.discovery import Discovery
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.sglang.launch import OWN_VARIABLES
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from tests.engine.real import ServerProcess, fleet_over, policy

ARGUMENTS = ["--device", "cpu", "--disable-overlap-schedule", "--max-total-tokens", "32768", "--sleep-on-idle"]
ARGUMENTS += ["--mem-fraction-static", "0.2", "--dtype", "float32", "--host", "127.0.0.1", "--skip-server-warmup"]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    **OWN_VARIABLES,
}


class RealServer(ServerProcess):
    """SGLang over the folder `model`. With `overlap` it schedules as on a GPU. `program` is what Python runs."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        overlap: bool = False,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        command = [os.environ["ASYNCRL_SGLANG_PYTHON"], *program, "--model-path", str(model)]
        usual = [each for each in ARGUMENTS if not overlap or each != "--disable-overlap-schedule"]
        super().__init__([*command, *usual, *arguments], {**ENVIRONMENT, **(environment or {})}, "/get_model_info", log)


def fleet_of(
    servers: Sequence[str] | Discovery, mode: str = "retract", into_servers: str = "auto", **options: Any
) -> AbstractAsyncContextManager[Fleet]:
    """A fleet over `servers`, kept until the end."""
    settings = ServerRouteSettings(into_servers, bucket_bytes=64 << 10)

    def open_server(url: str) -> SglangServer:
        return SglangServer(url, context=512, settings=settings, silence_s=30)

    return fleet_over(servers, open_server, policy(0), mode, **options)
