"""Compares a mixture's log-probs in the learner with the engine's, with and without replayed experts.

`python -m benchmarks.router_replay --python PATH` starts SGLang with the Python at PATH on the CPU, with a random
Qwen3-MoE, and samples TURNS turns at temperature 1 in each dtype of the engine. The learner then computes the log-probs
of the sampled tokens in each of its dtypes, once with its own routing and once with the engine's experts.

The learner gives a sampled token the probability pi, and the engine mu. With r = log pi - log mu, `mean_abs` is the
mean of |r|, and `k3` the mean of exp(r) - 1 - r, an estimate of KL(mu || pi). `changed` is the share of (token, layer)
at which the learner would choose other experts.

The result goes to benchmarks/results/router_replay.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from asyncrl.config.schema import ModelConfig
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.sglang.requests import RoutingRequest, generate_body, read_segment
from asyncrl.errors import EngineError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.model.routing_replay import CHANGED, CHOICES
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.child import kill_group, last_lines, start_guarded
from asyncrl.machine.ports import free_ports
from asyncrl.modelling.routing import RoutingShape, routing_shape
from asyncrl.types import Sampling
from benchmarks.record import write_result
from benchmarks.shapes import word_tokenizer

PROMPT, TURNS, TOKENS = 32, 64, 96
VOCABULARY = 2048
LAUNCHER = Path(__file__).parents[1] / "tests" / "sglang" / "routing_server.py"
ARGUMENTS = ["--device", "cpu", "--disable-overlap-schedule", "--max-total-tokens", "32768", "--sleep-on-idle"]
ARGUMENTS += ["--mem-fraction-static", "0.2", "--host", "127.0.0.1", "--skip-server-warmup"]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Turn(NamedTuple):
    """A sampled turn after `prompt` int32[P]: `tokens` int32[G], their `logprobs` float32[G], and `routing`
    uint8[P + G, W]. W bytes name the experts of a token; those of the last token are marked as missing."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routing: NDArray[np.uint8]


def save_model(folder: Path) -> RoutingShape:
    """Write a model of 8 layers with 4 of 32 experts for a token. Its weights are large, so that its routers
    prefer some experts clearly."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)
    return routing_shape(config)


async def sample(url: str, shape: RoutingShape, turns: int, tokens: int) -> list[Turn]:
    """Sample that many turns of `tokens` tokens, all at once."""
    rng = np.random.default_rng(0)
    http = Http(url)

    async def one(prompt: NDArray[np.int32]) -> Turn:
        sampling = Sampling(1.0, tokens)
        body = generate_body(uuid.uuid4().hex, prompt, sampling, (), None, 0)
        answer = await http.call("POST", "/generate", msgspec.json.encode(body))
        segment = read_segment(answer, sampling, (), RoutingRequest(shape, 0, len(prompt)))
        assert segment.routing is not None, segment.routing_fault
        rows = np.concatenate([segment.routing.rows, shape.missing(1)])
        return Turn(prompt, segment.tokens, segment.logprobs, rows)

    prompts = [rng.integers(0, VOCABULARY, PROMPT).astype(np.int32) for _ in range(turns)]
    try:
        return await asyncio.gather(*map(one, prompts))
    finally:
        await http.close()


async def ready(url: str) -> None:
    http = Http(url)
    while True:
        with suppress(EngineError):
            await http.get("/model_info", 60)
            return await http.close()
        await asyncio.sleep(0.2)


def sampled_by_server(python: str, model: Path, shape: RoutingShape, dtype: str, log: Path) -> list[Turn]:
    port = free_ports(1)
    command = [python, str(LAUNCHER), "--model-path", str(model), *ARGUMENTS, "--dtype", dtype, "--port", str(port)]
    server = start_guarded([*command, "--enable-return-routed-experts"], log, ENVIRONMENT)

    async def scenario() -> list[Turn]:
        await asyncio.wait_for(ready(f"http://127.0.0.1:{port}"), 300)
        return await sample(f"http://127.0.0.1:{port}", shape, TURNS, TOKENS)

    try:
        return asyncio.run(scenario())
    except BaseException:
        print(last_lines(log, 20))
        raise
    finally:
        kill_group(server)


@torch.no_grad()
def mismatch(policy: Policy, turns: Sequence[Turn]) -> dict[str, Mapping[str, float]]:
    """The differences between `policy` and engine on the sampled tokens, with and without replay."""
    sequences = [torch.from_numpy(np.concatenate([turn.prompt, turn.tokens])).long() for turn in turns]
    positions = torch.cat([torch.arange(len(each)) for each in sequences])
    sampled = torch.cat([torch.arange(len(turn.routing)) >= len(turn.prompt) for turn in turns])
    routing = torch.from_numpy(np.concatenate([turn.routing for turn in turns]))
    lengths = [len(each) for each in sequences]
    packed = PackedSequences.build(torch.cat(sequences), positions, sampled, lengths, None, routing)
    behaviour = np.concatenate([turn.logprobs for turn in turns])
    found: dict[str, Mapping[str, float]] = {}
    for name, this in (("own", packed.unrouted()), ("replayed", packed)):
        ratio = policy(this)[0][sampled].double().numpy() - behaviour
        found[name] = {
            "mean_abs": float(np.abs(ratio).mean()),
            "k3": float((np.expm1(ratio) - ratio).mean()),
            "largest": float(np.abs(ratio).max()),
        }
    sums = policy.replay_sums(packed)
    return {**found, "choices": {"changed": float(sums[CHANGED] / sums[CHOICES])}}


def measured(model: Path, turns: Sequence[Turn], dtype: str, ranks: Ranks) -> dict[str, Mapping[str, float]]:
    policy = load_policy(ModelConfig(str(model), dtype=dtype), 1.0, ranks, PROMPT + TOKENS, replays_routing=True)
    return mismatch(policy, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("ASYNCRL_SGLANG_PYTHON"), help="a Python that has sglang")
    parser.add_argument("--engine", nargs="+", default=["bfloat16", "float32"], help="dtypes of the engine")
    parser.add_argument("--learner", nargs="+", default=["bfloat16", "float32"], help="dtypes of the learner")
    arguments = parser.parse_args()
    if arguments.python is None:
        parser.error("--python: name a Python that has sglang, or set ASYNCRL_SGLANG_PYTHON")
    results = []
    with tempfile.TemporaryDirectory() as space, joined() as ranks:
        model = Path(space) / "model"
        shape = save_model(model)
        for engine in arguments.engine:
            turns = sampled_by_server(arguments.python, model, shape, engine, Path(space) / f"{engine}.log")
            for learner in arguments.learner:
                found = measured(model, turns, learner, ranks)
                results.append({"engine": engine, "learner": learner, **found})
                print(results[-1], flush=True)
    print(write_result("router_replay", results))


if __name__ == "__main__":
    main()
