"""Measures how many tokens a second a pool of scorers labels, from a real replay and back.

`python -m benchmarks.scoring_pool` fills a durable replay with trajectories in groups of 8 that share a prompt.
`python -m asyncrl.scoring` processes label them on the CPU, one thread each, with a process reward model of random
weights. Three settings are compared: one trajectory in each lease and forward pass; leases and passes that tokens
limit, as by default; and the same with two processes.

The clock runs from the first label to the last, so the time in which processes start does not count. Tokens a second
count every token of every trajectory, including prompts that are read once for a group.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Model

from asyncrl.commands.demo.step_scorer import StepScorer, save_step_scorer
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.commands.demo.warm_start import model_config
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Finish, Role, Step, Ticket, Trajectory, Turn, runs_of
from benchmarks.record import write_result
from benchmarks.serving import OWN_RUN, load, replay

STEPS = 6
LETTERS = np.array(build_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz")), np.int32)
SINGLY = ("scoring.batch_trajectories=1", "scoring.prm.micro_tokens=1")
WAYS: dict[str, tuple[int, Sequence[str]]] = {
    "one by one": (1, SINGLY),
    "one scorer": (1, ()),
    "two scorers": (2, ()),
}
LIMIT_S = 600.0


def make_prm(folder: Path, layers: int, hidden: int) -> int:
    """Write a process reward model of random weights, and return its number of parameters."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    scorer = StepScorer(Qwen3Model(model_config(tokenizer, layers, hidden)))
    save_step_scorer(scorer, tokenizer, {}, folder)
    return sum(parameter.numel() for parameter in scorer.parameters())


def make_trajectory(ticket: Ticket, prompt: int, response: int) -> Trajectory:
    """Make a trajectory of random letters: the group's prompt, and a turn of `STEPS` steps."""
    shared = np.random.default_rng(abs(hash(ticket.group_id))).choice(LETTERS, prompt)
    length = prompt + response
    mask = np.arange(length) >= prompt
    ends = np.linspace(prompt, length, STEPS + 1).astype(int).tolist()
    return Trajectory(
        id=ticket.id,
        task_id=ticket.task.id,
        group_id=ticket.group_id,
        member=ticket.member,
        tokens=np.concatenate([shared, np.random.default_rng().choice(LETTERS, response)]),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_runs=runs_of(np.where(mask, 0, -1).astype(np.int32)),
        turns=(Turn(0, prompt, Role.PROMPT), Turn(prompt, length, Role.ASSISTANT, "stop")),
        steps=tuple(Step(start, end) for start, end in pairwise(ends)),
        finish=Finish.COMPLETED,
    )


@contextmanager
def scorers(count: int, settings: Sequence[str]) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "asyncrl.scoring", *settings]
    processes = [
        subprocess.Popen(command, env={**environment, "ASYNCRL_WORKER": f"scorer-{index}"}, stderr=subprocess.DEVNULL)
        for index in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def rate(client: ReplayClient, count: int) -> float:
    """Labels a second from the first observed label to the last."""
    first: tuple[int, float] | None = None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        labelled, now = int(client.status()["labelled"]), time.monotonic()
        if labelled and first is None:
            first = labelled, now
        if labelled >= count and first is not None:
            return (labelled - first[0]) / (now - first[1])
        time.sleep(0.02)
    raise SystemExit(f"not all of {count} trajectories were labelled within {LIMIT_S:g} s")


def measure(folder: Path, way: str, options: argparse.Namespace, prm: Path) -> dict[str, Any]:
    number, further = WAYS[way]
    settings = [
        *(f"scoring.prm.path={prm}", "+scoring.needs={benchmark: [prm]}", "scoring.shaping.process_weight=1"),
        *further,
    ]
    folder.mkdir()
    with replay(folder, settings=settings) as running:
        client = ReplayClient(running.endpoints[0], "benchmark", "1", run=OWN_RUN)
        tickets: list[Ticket] = []
        while len(tickets) < options.count:
            tickets += client.tickets([ticket.id for ticket in tickets], options.count - len(tickets))
        client.put_all([make_trajectory(ticket, options.prompt, options.response) for ticket in tickets])
        port = running.endpoints[0].rpartition(":")[2]
        where = [f"model.path={prm}", f"data.train={folder / 'tasks.parquet'}", f"run.dir={folder}", "run.name=run"]
        with scorers(number, [*where, f"network.replay_port={port}", *settings]):
            per_s = rate(client, len(tickets))
        client.close()
    tokens = options.prompt + options.response
    return {"way": way, "trajectories": len(tickets), "trajectories_per_s": per_s, "tokens_per_s": per_s * tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1024, help="trajectories of a load")
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--response", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_prm(folder / "prm", options.layers, options.hidden)
        before, rows = load(), []
        for way in WAYS:
            rows.append(measure(folder / way.replace(" ", "-"), way, options, folder / "prm"))
            rows[-1]["ratio"] = rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"]
            print(rows[-1])
    result = {"options": vars(options), "parameters": parameters, "load_before": before, "rows": rows}
    print(f"written to {write_result('scoring-pool', result)}")


if __name__ == "__main__":
    main()
