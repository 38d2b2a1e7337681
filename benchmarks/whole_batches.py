"""Compares one request for many answers with one request for each, for episodes of one turn without tools.

`python -m benchmarks.whole_batches --python PATH` starts SGLang with the Python at PATH and a tiny random model. The
members of GROUPS groups, MEMBERS each, are sampled at once in three forms: `single`, a request for each answer, as the
fleet sends them; `list`, one request for all; `n`, one request for each group.

An answer ends at one of many stop tokens, so that lengths vary as in a run. The forms alternate with new prompts;
results are medians over rounds. `mean_wait_s` is the mean time from the beginning to an answer.

`--embedded` measures the embedded engine instead, once with a common prompt for each group, and once with a different
prompt for each answer. It also counts the prompt tokens that the engine computes.

Results go to benchmarks/results/whole-batches-NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from asyncrl.engine.fleet.http import Http
from asyncrl.engine.sglang.requests import generate_body, read_segment
from asyncrl.types import Sampling
from benchmarks.fleets import launched, server_version
from benchmarks.record import write_result
from benchmarks.shapes import SHAPES, make_model

GROUPS, MEMBERS = 8, 8
PROMPT, LONGEST, MEAN = 192, 256, 64
SHAPE = "tiny"
VOCABULARY = SHAPES[SHAPE].vocabulary
STOP = range(VOCABULARY // MEAN)
"""Stop tokens. A random model samples all tokens with about equal probability, so it samples a stop token after MEAN
tokens on average."""
SAMPLING = Sampling(1.0, LONGEST)

Prompt = NDArray[np.int32]
Ask = Callable[[Http, Sequence[Prompt]], Awaitable[list[tuple[float, bytes]]]]
"""A function that samples MEMBERS answers to each prompt, and returns the arrival time and the body of each."""


def body_of(prompt: Prompt) -> dict[str, Any]:
    return generate_body(uuid.uuid4().hex, prompt, SAMPLING, list(STOP), None)


async def post(http: Http, body: dict[str, Any]) -> tuple[float, bytes]:
    answer = await http.call("POST", "/generate", msgspec.json.encode(body))
    return time.perf_counter(), answer


async def single(http: Http, prompts: Sequence[Prompt]) -> list[tuple[float, bytes]]:
    return await asyncio.gather(*(post(http, body_of(prompt)) for prompt in prompts for _ in range(MEMBERS)))


async def listed(http: Http, prompts: Sequence[Prompt]) -> list[tuple[float, bytes]]:
    bodies = [body_of(prompt) for prompt in prompts for _ in range(MEMBERS)]
    body = {**bodies[0], **{name: [each[name] for each in bodies] for name in ("rid", "input_ids")}}
    return parts(*await post(http, body))


async def by_group(http: Http, prompts: Sequence[Prompt]) -> list[tuple[float, bytes]]:
    async def group(prompt: Prompt) -> list[tuple[float, bytes]]:
        body = body_of(prompt)
        del body["rid"]
        return parts(*await post(http, {**body, "sampling_params": {**body["sampling_params"], "n": MEMBERS}}))

    return [each for answers in await asyncio.gather(*map(group, prompts)) for each in answers]


def parts(came: float, answer: bytes) -> list[tuple[float, bytes]]:
    return [(came, bytes(each)) for each in msgspec.json.decode(answer, type=list[msgspec.Raw])]


FORMS: dict[str, Ask] = {"single": single, "list": listed, "n": by_group}


def cpu_of_children() -> float:
    """Processor seconds of the server, which are those of this process's children."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))


async def measure(http: Http, ask: Ask, prompts: Sequence[Prompt]) -> dict[str, float]:
    server, client, begun = cpu_of_children(), time.process_time(), time.perf_counter()
    answers = await ask(http, prompts)
    seconds = time.perf_counter() - begun
    segments = [read_segment(body, SAMPLING, list(STOP)) for _, body in answers]
    client = time.process_time() - client
    tokens = sum(len(segment.tokens) for segment in segments)
    cached = sum(msgspec.json.decode(body)["meta_info"]["cached_tokens"] for _, body in answers)
    assert len(answers) == len(prompts) * MEMBERS
    return {
        "tokens_per_s": tokens / seconds,
        "mean_wait_s": statistics.fmean(came - begun for came, _ in answers),
        "seconds": seconds,
        "server_cpu_us_per_token": (cpu_of_children() - server) / tokens * 1e6,
        "client_cpu_us_per_answer": client / len(answers) * 1e6,
        "prompt_tokens_computed": len(answers) * PROMPT - cached,
        "mean_length": tokens / len(answers),
    }


def new_prompts(rng: np.random.Generator, count: int) -> list[Prompt]:
    return list(rng.integers(len(STOP), VOCABULARY, (count, PROMPT), dtype=np.int32))


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


async def on_server(python: str, rounds: int, names: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    rng, runs = np.random.default_rng(0), {name: list[dict[str, float]]() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        make_model(SHAPE).save_pretrained(Path(folder) / "model")
        model, log = Path(folder) / "model", Path(folder) / "server.log"
        async with launched(python, model, log, arguments=arguments) as url:
            http = Http(url)
            for number in range(rounds + 1):
                first = number % len(names)
                for name in [*names[first:], *names[:first]]:
                    found = await measure(http, FORMS[name], new_prompts(rng, GROUPS))
                    if number:
                        runs[name].append(found)
            await http.close()
            return {"sglang": await server_version(url), **{name: medians(each) for name, each in runs.items()}}


async def embedded(groups: int, rng: np.random.Generator) -> dict[str, float]:
    """Sample the answers to `groups` different prompts, all at once."""
    from asyncrl.config.schema import EngineConfig
    from asyncrl.engine.embedded import EmbeddedEngine

    answers = GROUPS * MEMBERS
    engine = EmbeddedEngine(
        make_model(SHAPE), EngineConfig(slots=answers, max_length=PROMPT + LONGEST), initial_version=0
    )
    computed = 0
    plan = engine._scheduler.plan

    def counted() -> Any:
        nonlocal computed
        chunks = plan()
        computed += sum(chunk.end - chunk.start for slot, chunk in chunks if not slot.request.tokens)
        return chunks

    engine._scheduler.plan = counted  # type: ignore[method-assign]
    prompts = [prompt for prompt in new_prompts(rng, groups) for _ in range(answers // groups)]
    begun = time.perf_counter()
    stop = tuple(STOP)
    calls = (engine.generate(prompt, SAMPLING, stop, f"s{index}") for index, prompt in enumerate(prompts))
    found = await asyncio.gather(*calls)
    seconds = time.perf_counter() - begun
    await engine.close()
    tokens = sum(len(each.tokens) for each in found)
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "prompt_tokens_computed": computed}


async def in_process(rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ways = {"groups": GROUPS, "different prompts": GROUPS * MEMBERS}
    runs = [{name: await embedded(groups, rng) for name, groups in ways.items()} for _ in range(rounds + 1)]
    return {name: medians([run[name] for run in runs[1:]]) for name in ways}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--python", help="a Python that has sglang, to start a server with")
    where.add_argument("--embedded", action="store_true", help="the embedded engine instead")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms of requests")
    parser.add_argument("--policy", help="the server's own --schedule-policy")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the result has medians")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 2)
    arguments = ["--schedule-policy", options.policy] if options.policy else []
    if options.embedded:
        result = asyncio.run(in_process(options.rounds))
    else:
        result = asyncio.run(on_server(options.python, options.rounds, options.forms, arguments))
    loads = {"load_before": load, "load_after": round(os.getloadavg()[0], 2)}
    setting = {"groups": GROUPS, "members": MEMBERS, "prompt_tokens": PROMPT, "longest_answer": LONGEST}
    name = "embedded" if options.embedded else "-".join(filter(None, ["sglang-cpu", options.policy]))
    print(result)
    print(write_result(f"whole-batches-{name}", {**loads, **setting, **result}))


if __name__ == "__main__":
    main()
