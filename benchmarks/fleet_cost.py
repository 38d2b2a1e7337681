"""What our fleet itself costs, over a server that answers at once: see benchmarks.rollout."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.clients import Load, bare_client, fleet_client
from benchmarks.fleets import Policy, Push, fleet_over
from benchmarks.instant_server import VOCABULARY, instant_server
from benchmarks.throughput import compare, processor_cost

LENGTHS = (16, 512)
PROMPT = 512
CONCURRENCY = 256
REQUESTS = 1024


async def measure(rounds: int) -> dict[str, Any]:
    """Processor time by request and token of the fleet and of the bare client."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(instant_server())
        policy = _tiny(folder)
        opened = await stack.enter_async_context(fleet_over([url], policy, 1024, Push(), folder))
        clients = {
            "fleet": fleet_client(opened.fleet),
            "bare": await stack.enter_async_context(bare_client([url], logprobs=True)),
        }
        short, long = [
            await compare(clients, Load(PROMPT, length, VOCABULARY), CONCURRENCY, REQUESTS, rounds)
            for length in LENGTHS
        ]
    return {
        "concurrency": CONCURRENCY,
        "prompt_tokens": PROMPT,
        **{name: processor_cost(short[name], long[name], REQUESTS, LENGTHS) for name in clients},
    }


def _tiny(folder: Path) -> Policy:
    """Weights of one number: the server does not look at them."""
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
    return Policy(folder)
