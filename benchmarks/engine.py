"""Compares the embedded engine with transformers' methods of generation and with the matrix products alone.

`python -m benchmarks.engine` prints a table and writes benchmarks/results/engine-THREADS.json. The load is 64 requests
at once with prompts of 60 tokens on a Qwen3 of 2.5M parameters: `even` with 96 new tokens each, which is the best case
of a static batch, and `mixed` with 32 to 160. The methods alternate, so that other work of the machine slows all of
them alike. The table has the best and the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from asyncrl.config.schema import EngineConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.types import Sampling
from benchmarks.record import RESULTS, processor
from benchmarks.shapes import make_model

REQUESTS, PROMPT, VOCABULARY = 64, 60, 512


def matrix_products(new: list[int]) -> float:
    """Seconds for the products of weights and activations alone: all prompts in one pass, then one pass a token."""
    model = make_model("2.5M")
    weights = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    prompts = torch.randn(REQUESTS * PROMPT, 512)
    started = time.perf_counter()
    with torch.inference_mode():
        for step in range(max(new)):
            active = sum(step < n for n in new)
            for weight in [*weights, model.get_input_embeddings().weight]:
                rows = prompts if step == 0 else prompts[:active]
                rows[:, : weight.shape[1]] @ weight.T
    return time.perf_counter() - started


def embedded(new: list[int], prompts: list[Any], switches: int = 0) -> float:
    """Seconds of the engine, during which its weights change `switches` times."""

    async def main() -> float:
        model = make_model("2.5M")
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = EmbeddedEngine(model, EngineConfig(slots=REQUESTS, max_length=512), initial_version=0)
        started = time.perf_counter()
        calls = asyncio.gather(
            *(
                engine.generate(p, Sampling(1.0, n), (), f"s{i}")
                for i, (p, n) in enumerate(zip(prompts, new, strict=True))
            )
        )
        for version in range(1, switches + 1):
            while engine.stats().tokens < sum(new) * version / (switches + 1):
                await asyncio.sleep(0.005)
            await engine.update_weights(version, weights)
        await calls
        seconds = time.perf_counter() - started
        await engine.close()
        return seconds

    return asyncio.run(main())


def static_generate(new: list[int], prompts: list[Any]) -> float:
    """Seconds of one padded batch, which lasts as long as its longest member."""
    model = make_model("2.5M")
    config = GenerationConfig(max_new_tokens=max(new), min_new_tokens=max(new), do_sample=True, top_k=0, pad_token_id=0)
    ids = torch.from_numpy(np.stack(prompts)).long()
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return time.perf_counter() - started


def continuous_batching(new: list[int], prompts: list[Any]) -> float:
    """Seconds of transformers' continuous batching. Its default blocks are slower here than these far smaller ones."""
    model = make_model("2.5M")
    config = GenerationConfig(max_new_tokens=max(new), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
    blocks = ContinuousBatchingConfig(
        page_size=16, num_blocks=REQUESTS * (PROMPT + max(new) + 16) // 16, max_batch_tokens=256
    )
    started = time.perf_counter()
    got = model.generate_batch(
        [p.tolist() for p in prompts], generation_config=config, continuous_batching_config=blocks, progress_bar=False
    )
    assert len(got) == REQUESTS
    return time.perf_counter() - started


def measure(rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, PROMPT).astype(np.int32) for _ in range(REQUESTS)]
    even, mixed = [96] * REQUESTS, rng.permutation(np.linspace(32, 160, REQUESTS).astype(int)).tolist()
    ways: dict[tuple[str, str], Callable[[], float]] = {}
    for load, new in (("even", even), ("mixed", mixed)):
        ways |= {
            ("matrix products alone", load): partial(matrix_products, new),
            ("embedded engine", load): partial(embedded, new, prompts),
            ("embedded engine, 3 weight switches", load): partial(embedded, new, prompts, switches=3),
            ("transformers generate, static batch", load): partial(static_generate, new, prompts),
        }
    ways["transformers continuous batching", "even"] = partial(continuous_batching, even, prompts)
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            seconds[way].append(run())
    tokens = {"even": sum(even), "mixed": sum(mixed)}
    return [
        {
            "way": way,
            "load": load,
            "best_tokens_per_s": round(tokens[load] / min(taken)),
            "median_tokens_per_s": round(tokens[load] / statistics.median(taken)),
        }
        for (way, load), taken in seconds.items()
    ]


def machine() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    rows = measure(options.rounds)
    report = {"date": datetime.date.today().isoformat(), "machine": machine(), "results": rows}
    print(f"{'tokens/s, best and median':40} {'load':6} {'best':>7} {'median':>7}")
    for row in rows:
        print(f"{row['way']:40} {row['load']:6} {row['best_tokens_per_s']:7} {row['median_tokens_per_s']:7}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"engine-{options.threads}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
