"""Tokens a second and processor time of several clients that alternate over the same servers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.clients import Client, Load, Run, run_all


async def compare(
    clients: Mapping[str, Client], load: Load, concurrency: int, requests: int, rounds: int
) -> dict[str, list[Run]]:
    """Run `requests` requests with each client in each round, after a warm-up round. Each round begins with
    the next client."""
    rng = np.random.default_rng()
    runs: dict[str, list[Run]] = {name: [] for name in clients}
    for number in range(rounds + 1):
        for name in _from(list(clients), number):
            run = await run_all(clients[name], load.prompts(rng, requests), load.output, concurrency)
            if number:
                runs[name].append(run)
    return runs


def rows(runs: Mapping[str, Sequence[Run]], tokens: int, limit: str) -> Iterator[dict[str, Any]]:
    """A row for each client: medians of runs with `tokens` each, and the median of the rounds' ratios to client
    `limit`."""
    for name, taken in runs.items():
        pairs = zip(runs[limit], taken, strict=True)
        yield {
            "client": name,
            "tokens_per_s": round(tokens / statistics.median(run.seconds for run in taken)),
            "best_tokens_per_s": round(tokens / min(run.seconds for run in taken)),
            f"ratio_to_{limit}": round(statistics.median(other.seconds / run.seconds for other, run in pairs), 3),
            "client_cpu_us_per_token": round(statistics.median(run.cpu_s for run in taken) / tokens * 1e6, 2),
        }


def processor_cost(
    short: Sequence[Run], long: Sequence[Run], requests: int, lengths: tuple[int, int]
) -> dict[str, Any]:
    """Processor time of a client by request and by token, from runs of `requests` with answers of two lengths."""
    few, many = lengths
    at_few, at_many = (statistics.median(run.cpu_s for run in runs) / requests for runs in (short, long))
    token = (at_many - at_few) / (many - few)
    return {
        "us_per_request": round((at_few - few * token) * 1e6, 1),
        "us_per_token": round(token * 1e6, 3),
        f"tokens_per_s_of_one_core_at_{many}_a_request": round(many / at_many),
        f"tokens_per_s_of_one_core_at_{few}_a_request": round(few / at_few),
    }


def _from(names: list[str], first: int) -> list[str]:
    first %= len(names)
    return names[first:] + names[:first]
