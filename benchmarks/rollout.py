"""Measures how fast asyncrl's fleet generates over a real SGLang server, and the cost of a push meanwhile.

`python -m benchmarks.rollout --python PATH` starts a server of a tiny random model with the Python at PATH, on the GPU
if there is one (`--shape 0.6B`), else on the CPU. `--url URL --model FOLDER` takes running servers instead, which must
serve that folder (`python -m benchmarks.shapes` writes one) with --skip-tokenizer-init. `--fake` starts a server that
answers immediately, so that only asyncrl's cost is measured. Results go to benchmarks/results/rollout-NAME.json.

Throughput: clients send requests of one fixed length with distinct random prompts, a fixed number at once. The fleet is
compared with a bare asyncio client, which drops the answers unread and so shows the server's limit. A third client
requests no log-probs, which shows their cost. The clients alternate, and ratios are medians over rounds.

Pushes: a new request follows each that ends. Answers are not streamed, so tokens count when their answer arrives.
Requests are short and of mixed lengths, so that some end in every few decoding steps.

A standstill is the longest time around the push without an answer, less the longest in the calm time before. `lost_s`
is the whole cost of a push: the lost seconds of generation. Each push carries all weights, with unchanged values. A
mode that the servers (SGLang before 0.5.22) replace by `abort` is left out.

Whole episodes, with turns and tool calls, are measured with `--fake` only: random weights call no tools.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import push_under_load
from benchmarks.clients import Load, bare_client, fleet_client
from benchmarks.copies import link_limits
from benchmarks.fleet_cost import measure as fleet_cost
from benchmarks.fleets import Policy, Push, fleet_over, launched, server_version
from benchmarks.push_under_load import PushLoad
from benchmarks.record import write_result
from benchmarks.throughput import compare, rows

PARTS = ("throughput", "pushes")
MIN_REQUESTS = 4
MODES = ("retract", "in_place", "abort")


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements: requests of `prompt` and `output` tokens, at each of `concurrencies`, and the pushes."""

    prompt: int
    output: int
    concurrencies: Sequence[int]
    push: PushLoad


SMALL = Plan(32, 32, (1, 8, 32), PushLoad(requests=32, prompt=32, shortest=4, longest=28, pushes=3, calm_s=1.5))
LARGE = Plan(512, 512, (1, 64, 256), PushLoad(requests=256, prompt=128, shortest=32, longest=224, pushes=4, calm_s=6.0))


@dataclass(frozen=True, slots=True)
class Servers:
    urls: Sequence[str]
    policy: Policy
    folder: Path


@asynccontextmanager
async def servers(options: argparse.Namespace) -> AsyncIterator[Servers]:
    """The servers of the command line, or a new one."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.url:
            yield Servers(options.url, Policy(options.model), folder)
            return
        from benchmarks.shapes import make_model

        gpu = torch.cuda.is_available()
        model = make_model(options.shape, *((torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")))
        model.save_pretrained(folder / "model")
        del model
        url = await stack.enter_async_context(launched(options.python, folder / "model", folder / "server.log"))
        yield Servers([url], Policy(folder / "model"), folder)


async def throughput(served: Servers, plan: Plan, push: Push, rounds: int) -> list[dict[str, Any]]:
    """Measure every client at every concurrency."""
    load = Load(plan.prompt, plan.output, served.policy.vocabulary)
    result = []
    async with AsyncExitStack() as stack:
        context = plan.prompt + plan.output
        opened = await stack.enter_async_context(
            fleet_over(served.urls, served.policy, context, push, served.folder / "throughput")
        )
        clients = {
            "fleet": fleet_client(opened.fleet),
            "bare": await stack.enter_async_context(bare_client(served.urls, logprobs=True)),
            "bare, no log-probs": await stack.enter_async_context(bare_client(served.urls, logprobs=False)),
        }
        for concurrency in plan.concurrencies:
            requests = max(MIN_REQUESTS, 2 * concurrency)
            runs = await compare(clients, load, concurrency, requests, rounds)
            for row in rows(runs, requests * plan.output, "bare"):
                result.append({"concurrency": concurrency, **row})
                print(result[-1], flush=True)
    return result


async def pushes(served: Servers, plan: Plan, wanted: Sequence[Push]) -> list[dict[str, Any]]:
    """Measure every mode and route of pushes."""
    result = []
    for number, push in enumerate(wanted):
        row_of = {"mode": push.mode, "into_servers": push.into_servers}
        folder = served.folder / f"pushes-{number}"
        try:
            row = await push_under_load.measure(served.urls, served.policy, plan.push, push, folder)
        except (TimeoutError, ValueError) as error:
            row = {**row_of, "failed": str(error) or "no server took the weights"}
        result.append(row or {**row_of, "failed": "these servers replace this mode by abort"})
        print({name: value for name, value in result[-1].items() if name != "each_push"}, flush=True)
    return result


async def on_servers(options: argparse.Namespace) -> dict[str, Any]:
    plan = LARGE if torch.cuda.is_available() else SMALL
    plan = replace(plan, push=replace(plan.push, pushes=options.pushes or plan.push.pushes))
    wanted = [Push(mode, way) for way in options.ways for mode in options.modes]
    async with servers(options) as served:
        result: dict[str, Any] = {
            "sglang": await server_version(served.urls[0]),
            "servers": len(served.urls),
            "parameters": served.policy.parameters,
            "megabytes": round(served.policy.nbytes / 1e6, 1),
        }
        if "throughput" in options.only:
            result |= {"prompt_tokens": plan.prompt, "output_tokens": plan.output}
            result["throughput"] = await throughput(served, plan, wanted[0], options.rounds)
        if "pushes" in options.only:
            result |= {"limits_gigabytes_per_s": link_limits(), "push_load": asdict(plan.push)}
            result["pushes"] = await pushes(served, plan, wanted)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--python", help="a Python that has sglang, to start a server with")
    where.add_argument("--url", action="append", help="a running server without other clients; may be repeated")
    where.add_argument("--fake", action="store_true", help="asyncrl's cost, over a server that answers immediately")
    parser.add_argument("--shape", default="tiny", help="size of the model for --python, from benchmarks/shapes.py")
    parser.add_argument("--model", type=Path, help="the folder that the servers of --url serve")
    parser.add_argument("--ways", nargs="+", default=["auto"], help="as in weights.into_servers")
    parser.add_argument("--modes", nargs="+", default=MODES, help="as in weights.mode")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the result has their medians")
    parser.add_argument("--pushes", type=int, help="pushes of each mode and route; the result has their medians")
    parser.add_argument("--name", help="name of the result; default: cpu, cuda or fake")
    options = parser.parse_args()
    if options.url and options.model is None:
        parser.error("--url needs --model, the folder that the servers serve")
    return options


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    options = parse()
    load = round(os.getloadavg()[0], 2)
    result = asyncio.run(fleet_cost(options.rounds) if options.fake else on_servers(options))
    cuda = torch.cuda.is_available() and not options.fake
    name = options.name or ("fake" if options.fake else "cuda" if cuda else "cpu")
    loads = {"load_before": load, "load_after": round(os.getloadavg()[0], 2)}
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else None
    path = write_result(f"rollout-{name}", {**loads, **result}, device)
    print(path)


if __name__ == "__main__":
    main()
