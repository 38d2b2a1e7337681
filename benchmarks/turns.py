"""Measures the processor time that an actor takes for a turn: `python -m benchmarks.turns`.

The actor is the real process, `python -m asyncrl.actor`. Its server answers every request at once with a turn that
calls the calculator. A real replay process gives the tickets, and stores the trajectories. So the result has everything
that a turn costs: rendering, tokenising, requests, tools, recording, spans, metrics and delivery.

`--tokenizer FOLDER` names a Hugging Face tokenizer, and `--chat-template FILE` its template. Without them the actor
uses the demo's tokenizer, which has one token for each byte. The policy is a tiny model with the tokenizer's
vocabulary.

`--profile` runs the actor under Python's profiler in one more round. The result then has the share of each package in
the processor time of the event loop. The profiler slows down Python more than other code.

The result is in benchmarks/results/turns-NAME.json: medians over rounds of one process.
"""

from __future__ import annotations

import argparse
import json
import pstats
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from asyncrl.chat.chat import Chat
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import ModelConfig
from asyncrl.data.writing import write_tasks
from asyncrl.modelling.shapes import model_shapes
from asyncrl.replay.client.client import ReplayClient
from asyncrl.tools.calculator import Calculator
from asyncrl.types import Task
from asyncrl.weights.server import WeightServer
from benchmarks.instant_server import instant_server
from benchmarks.record import write_result
from benchmarks.serving import OWN_RUN, cpu_seconds, load, replay

TURNS, GROUP, AT_ONCE, TASKS = 5, 16, 256, 1000
PROMPT = 300
"""Tokens of the first prompt, with the system message and the tools."""
TURN, DISTINCT = 48, 2000
"""The tokens of a turn, and the number of different turns."""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
END = "<|im_end|>"
WORDS = (
    *("She", "sells", "some", "of", "her", "eggs", "at", "the", "market", "every", "day", "and", "bakes", "muffins"),
    *("for", "friends", "with", "the", "others"),
)
SYSTEM = "Solve the problem. Use the calculator. End with #### and the answer."
PROFILED = """
import cProfile, sys, time
import asyncrl.actor.from_config, asyncrl.engine.from_config, asyncrl.weights.from_config
from asyncrl.actor.__main__ import main
profile = cProfile.Profile(time.thread_time)
profile.runcall(main, sys.argv[2:])
profile.dump_stats(sys.argv[1])
"""
"""Profiles the main thread of an actor in processor time. The imports come first, so that they do not count."""
POLL_S = 0.02
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """The processor and wall-clock seconds in which the actor played `turns` turns."""

    turns: int
    cpu_s: float
    threads_s: Mapping[str, float]
    seconds: float


def turns_of(tokenizer: Any) -> list[list[int]]:
    """Turns of about `TURN` tokens: some words, a call of the calculator, and the end token. Small operands are more
    frequent than large ones, so that some results repeat, as they do in problems for schools."""
    rng = np.random.default_rng(1)
    words = tokenizer.encode(" ".join(WORDS) + "\n", add_special_tokens=False)
    turns = []
    for left, right in np.exp(rng.uniform(0, np.log(500), (DISTINCT, 2))).astype(int).tolist():
        text = CALL % f"{left} {rng.choice(list('+-*/'))} {right}"
        call = tokenizer.encode(text + END, add_special_tokens=False)
        turns.append([*words[: max(0, TURN - len(call))], *call])
    return turns


def tasks(tokenizer: Any) -> list[Task]:
    """Tasks whose prompts have about `PROMPT` tokens."""
    rng, chat = np.random.default_rng(0), Chat(tokenizer)
    tools = [{"type": "function", "function": Calculator.schema}]
    per_word = len(tokenizer.encode(" ".join(WORDS), add_special_tokens=False)) / len(WORDS)
    words = max(1, round((PROMPT - len(chat.prompt(messages("?"), tools))) / per_word))
    questions = (" ".join(rng.choice(WORDS, words)) for _ in range(TASKS))
    return [Task(f"benchmark/train/{at}", messages(each), "15", "benchmark") for at, each in enumerate(questions)]


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def write_policy(folder: Path, tokenizer: Any) -> None:
    """Write a tiny model with the tokenizer's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def published(model: Path) -> Iterator[int]:
    """Serve version 0 of the weights, and yield the port."""
    expected = model_shapes(ModelConfig(path=str(model))).tensors
    context: zmq.Context[Any] = zmq.Context()
    with closing(WeightServer("127.0.0.1", 0, context, run=OWN_RUN)) as server:
        server.publish(0, {name: torch.zeros(shape) for name, shape in expected.items()})
        yield int(server.endpoint.rpartition(":")[2])
    context.term()


@contextmanager
def actor(folder: Path, settings: Sequence[str], profile: Path | None = None) -> Iterator[int]:
    """Run the actor's process, and yield its process id."""
    program = ("-m", "asyncrl.actor") if profile is None else ("-c", PROFILED, str(profile))
    with (folder / "actor.log").open("a") as log:
        process = subprocess.Popen([sys.executable, *program, *settings], stderr=log)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of the event loop's thread, and of all other threads by name."""
    found: defaultdict[str, float] = defaultdict(float)
    for each in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # The thread may have ended.
            name = "event loop" if int(each.name) == pid else (each / "comm").read_text().strip()
            found[name] += int((each / "schedstat").read_text().split()[0]) / 1e9
    return dict(found)


def play(pid: int, client: ReplayClient, episodes: int) -> Round:
    """Wait until the actor has delivered that many episodes."""
    first, begun, cpu_before, before = _delivered(client), time.perf_counter(), cpu_seconds(pid), thread_seconds(pid)
    while (done := _delivered(client) - first) < episodes:
        time.sleep(POLL_S)
    seconds, cpu_s = time.perf_counter() - begun, cpu_seconds(pid) - cpu_before
    threads_s = {name: each - before.get(name, 0.0) for name, each in thread_seconds(pid).items()}
    return Round(done * TURNS, cpu_s, threads_s, seconds)


def _delivered(client: ReplayClient) -> int:
    return int(client.status()["accepted"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer) if options.tokenizer else build_tokenizer()
    if options.chat_template:
        tokenizer.chat_template = options.chat_template.read_text()
    turns = turns_of(tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_policy(folder / "model", tokenizer)
        write_tasks(folder / "tasks.parquet", tasks(tokenizer))
        with published(folder / "model") as weights_port, instant_server(turns) as url:
            common = [
                *(f"actor.max_turns={TURNS}", "actor.tools=[calculator]", f"actor.concurrency={AT_ONCE}"),
                *("actor.max_turn_tokens=256", "replay.durability=os", f"learner.group_size={GROUP}"),
            ]
            with replay(folder, settings=common) as served:
                of_actor = [
                    *common,
                    *(f"model.path={folder}/model", f"data.train={folder}/tasks.parquet", "actor.max_tokens=4096"),
                    *(f"run.dir={folder}", f"run.name={OWN_RUN.name}", "engine=sglang", f"engine.urls=[{url}]"),
                    *("learner.batch_size=64", "replay.max_lag=1000000", "weights.canary=false"),
                    *("weights.to_engines=zmq", f"network.weights_port={weights_port}"),
                    f"network.replay_port={served.endpoints[0].rpartition(':')[2]}",
                ]
                rounds = _rounds(folder, served.endpoints[0], of_actor, options.rounds, options.episodes)
                result = described(rounds)
                if options.profile:
                    file = folder / "profile"
                    _rounds(folder, served.endpoints[0], of_actor, 1, options.episodes, file)
                    result["profiled_shares"] = shares(file)
                    if options.profile_file:
                        options.profile_file.write_bytes(file.read_bytes())
    return result


def _rounds(
    folder: Path, endpoint: str, settings: Sequence[str], rounds: int, episodes: int, profile: Path | None = None
) -> list[Round]:
    with actor(folder, settings, profile) as pid:
        client = ReplayClient(endpoint, "benchmark", "1", give_up_s=START_S)
        try:
            play(pid, client, 2 * AT_ONCE)
            return [play(pid, client, episodes) for _ in range(rounds)]
        finally:
            client.close()


def described(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over rounds, in microseconds a turn."""

    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 1)

    names = sorted({name for each in rounds for name in each.threads_s})
    return {
        "turns_per_episode": TURNS,
        "turn_tokens": TURN,
        "episodes_at_once": AT_ONCE,
        "us_per_turn": median(each.cpu_s / each.turns * 1e6 for each in rounds),
        "us_per_turn_of_rounds": [round(each.cpu_s / each.turns * 1e6, 1) for each in rounds],
        "us_per_turn_by_thread": {
            name: median(each.threads_s.get(name, 0.0) / each.turns * 1e6 for each in rounds) for name in names
        },
        "turns_per_s": median(each.turns / each.seconds for each in rounds),
    }


def shares(file: Path) -> dict[str, float]:
    """The share of each package in the profiled time of the event loop."""
    spent: Counter[str] = Counter()
    for (path, _, function), (_, _, own_s, _, _) in pstats.Stats(str(file)).stats.items():  # type: ignore[attr-defined]
        spent[_package(path, function)] += own_s
    total = sum(spent.values())
    return {name: round(seconds / total, 3) for name, seconds in spent.most_common() if seconds / total >= 0.01}


def _package(path: str, function: str) -> str:
    parts = Path(path).with_suffix("").parts
    for root in ("asyncrl", "site-packages"):
        if root in parts:
            inner = parts[len(parts) - 1 - parts[::-1].index(root) + 1 :]
            return ".".join((root, *inner[:2])) if root == "asyncrl" else inner[0]
    return function if path == "~" else parts[-1] if len(parts) < 2 else "/".join(parts[-2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--chat-template", type=Path, help="file of a chat template for the tokenizer")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also measure shares with Python's profiler")
    parser.add_argument("--profile-file", type=Path, help="keep the profile in this file")
    parser.add_argument("--name", help="name of the result; default: the tokenizer's folder, or demo")
    options = parser.parse_args()
    before = load()
    result = measure(options)
    result |= {"load_before": before, "load_after": load()}
    print(json.dumps(result, indent=2))
    name = options.name or (options.tokenizer.name if options.tokenizer else "demo")
    print(write_result(f"turns-{name}", result))


if __name__ == "__main__":
    main()
