"""Measures how fast a scorer reads trajectories in micro-batches and one by one, and the saving by shared prompts.

The model is a process reward model of Qwen2's architecture with random weights: 50M parameters in float32 on the CPU,
or with `--device cuda` the shape of Qwen2.5-Math-PRM-7B in bfloat16. A load is groups of 8 trajectories with a common
prompt. The lengths of prompts and responses are log-normal, so that a few are long. The methods alternate, so that
other work of the machine slows all of them alike.

Tokens a second count every token of every trajectory, including tokens that sharing saves. The share of the matrix peak
is the rate of useful operations (2 * parameters * computed tokens) divided by the rate of a large matrix product in the
same run. Embeddings, attention scores and padding are not useful operations.

    python -m benchmarks.scoring --threads 1
    python -m benchmarks.scoring --device cuda --groups 32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from asyncrl.scoring.models.batching import pass_cost, share_prefixes
from asyncrl.scoring.models.causal import CausalReader
from asyncrl.scoring.models.encoding import Encoded
from asyncrl.scoring.models.qwen_prm import contrast
from benchmarks.record import RESULTS, machine, write_result

STARTED = time.perf_counter()
MEMBERS, STEPS = 8, 6
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
    },
    "cuda": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}
Way = Callable[[Sequence[Encoded]], list[Any]]
MATRIX = {"cpu": 2048, "cuda": 8192}
RESPONSE = {"cpu": 80, "cuda": 250}
"""Median tokens of a response."""
LOADS = {"short prompts": 0.5, "long prompts": 6}
"""Median tokens of a prompt, as a multiple of a median response."""


@dataclass(frozen=True)
class Row:
    """One method on one load, over the rounds."""

    load: str
    way: str
    median_tokens_per_s: float
    best_tokens_per_s: float
    matrix_share: float


def make_backbone(device: str) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[device], max_position_embeddings=8192)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2Model(config).eval()
    finally:
        torch.set_default_dtype(default)


def make_load(rng: np.random.Generator, groups: int, prompt: float, response: float, vocabulary: int) -> list[Encoded]:
    """Make trajectories in a random order, since a replay may lease them in any order."""
    inputs = []
    for _ in range(groups):
        shared = rng.integers(0, vocabulary, _length(rng, prompt, 0.5))
        for _ in range(MEMBERS):
            ids = [*shared.tolist(), *rng.integers(0, vocabulary, _length(rng, response, 0.8)).tolist()]
            ends = np.linspace(len(shared), len(ids) - 1, STEPS + 1).astype(int)[1:]
            inputs.append(Encoded(ids, [[int(end)] for end in ends]))
    return [inputs[index] for index in rng.permutation(len(inputs))]


def _length(rng: np.random.Generator, median: float, spread: float) -> int:
    """Draw a log-normal length of at most 8 times the median."""
    return int(np.clip(rng.lognormal(np.log(median), spread), STEPS * 2, 8 * median))


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def timed(way: Way, inputs: Sequence[Encoded], device: str) -> tuple[float, Any]:
    """Run a method, and return its seconds and its result."""
    found: list[Any] = []
    return seconds(lambda: found.append(way(inputs)), device), found[0]


def matrix_peak(device: str) -> float:
    """FLOP/s of a large product of random matrices in the model's dtype, the best of several."""
    size = MATRIX[device]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: first @ second, device) for _ in range(10))


def computed(inputs: Sequence[Encoded], shares: bool, device: str) -> int:
    """The number of tokens that go through the model, without padding."""
    total = sum(len(each.ids) for each in inputs)
    if not shares:
        return total
    sets = share_prefixes([each.ids[: each.reads[0][0]] for each in inputs], pass_cost(device))
    return total - sum((len(members) - 1) * prefix for prefix, members in sets)


def measure(device: str, groups: int, micro_tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the result so far after each load."""
    backbone = make_backbone(device)
    embedded = backbone.get_input_embeddings().weight.numel()
    parameters = sum(each.numel() for each in backbone.parameters()) - embedded
    peak = matrix_peak(device)
    progress(f"{parameters / 1e6:.0f}M parameters without embeddings, matrix products at {peak / 1e12:.3g} TFLOP/s")
    ways = make_ways(backbone, device, micro_tokens)
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    loads: dict[str, dict[str, float]] = {}
    for load, prompt in LOADS.items():
        response = RESPONSE[device]
        inputs = make_load(rng, groups, prompt * response, response, backbone.config.vocab_size)
        taken, differences = take_turns(ways, inputs, rounds, device)
        tokens = computed(inputs, False, device)
        loads[load] = {
            "trajectories": len(inputs),
            "tokens": tokens,
            "tokens_with_sharing": computed(inputs, True, device),
            "longest": max(len(each.ids) for each in inputs),
            **differences,
        }
        for way, times in taken.items():
            median = statistics.median(times)
            share = 2 * parameters * computed(inputs, "shared" in way, device) / median / peak
            rows.append(asdict(Row(load, way, tokens / median, tokens / min(times), share)))
        yield {"parameters": parameters, "matrix_tflops": peak / 1e12, "loads": loads, "rows": rows}


def make_ways(backbone: Any, device: str, micro_tokens: int) -> dict[str, Way]:
    width = backbone.config.hidden_size
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)).to(device).float()
    whole, sharing = (CausalReader(backbone, contrast(head), micro_tokens, share) for share in (False, True))
    return {
        "one by one": lambda inputs: list(chain.from_iterable(whole.read([each]) for each in inputs)),
        "micro-batches": whole.read,
        "micro-batches, prompts shared": sharing.read,
    }


def progress(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:8.1f} s: {text}", flush=True)


def take_turns(
    ways: dict[str, Way], inputs: Sequence[Encoded], rounds: int, device: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each method by round, and the largest difference between the methods' logits."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Sequence[np.ndarray[Any, Any]]] = {}
    for way in ways.values():
        way(inputs if device == "cuda" else inputs[:1])
    for _ in range(rounds):
        for name, way in ways.items():
            took, found[name] = timed(way, inputs, device)
            taken[name].append(took)
            progress(f"{name}: {len(inputs)} trajectories in {taken[name][-1]:.2f} s")
    flat = {name: np.concatenate(each) for name, each in found.items()}
    alone = flat["one by one"]
    apart = max(float(np.abs(each - alone).max()) for each in flat.values())
    return taken, {"largest_difference_of_logits": apart, "spread_of_logits": float(alone.std())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--groups", type=int, default=4, help=f"groups of {MEMBERS} trajectories in a load")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="limit of tokens in one forward pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    path, result = RESULTS, {}
    for result in measure(options.device, options.groups, options.micro_tokens, options.rounds):
        row = {"options": vars(options), **result}
        path = write_result(f"scoring-{options.device}", row, f"{device}, torch {torch.__version__}")
    print(f"{'load':14} {'way':30} {'median tok/s':>12} {'best':>9} {'of peak':>8}")
    for row in result["rows"]:
        figures = f"{row['median_tokens_per_s']:12.0f} {row['best_tokens_per_s']:9.0f} {row['matrix_share']:8.1%}"
        print(f"{row['load']:14} {row['way']:30} {figures}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
