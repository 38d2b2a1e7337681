"""Real vLLM servers, and a fleet over them."""

from __future__ import annotations

import json
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from asyncrl.actor.engine.fleet.fleet import Fleet
from asyncrl.actor.engine.vllm.server import VllmServer
from tests.actor.engine import real
from tests.actor.engine.real import CONTEXT, ServerProcess, fleet_over

ARGUMENTS = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
ARGUMENTS += ["--logprobs-mode", "processed_logprobs"]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
UNTIED = {"tie_word_embeddings": False}
DEFAULTS = {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": [3, 7, 9]}
"""What a model's folder may have a server do unless a request says otherwise."""


def policy(seed: int) -> Any:
    return real.policy(seed, **UNTIED)


def save_policy(folder: Path) -> Path:
    real.save_policy(folder, **UNTIED)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


class RealServer(ServerProcess):
    """vLLM over the folder `model`."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        command = [os.environ["ASYNCRL_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        super().__init__([*command, *ARGUMENTS, *arguments], ENVIRONMENT, "/health", log)


class SilentServer(VllmServer):
    """Is asked as a server without `--enable-scale-out`, which tells no versions."""

    async def _tells_versions(self) -> bool:
        return False


def fleet_of(
    url: str, mode: str = "retract", kind: type[VllmServer] = VllmServer, **options: Any
) -> AbstractAsyncContextManager[Fleet]:
    """A fleet over the server at `url`, kept until the end."""

    def open_server(url: str) -> VllmServer:
        return kind(url, context=512, tied=False, silence_s=30)

    return fleet_over([url], open_server, policy(0, **UNTIED), mode, **options)
