"""Measures the cost of recording spans in a role, and its share of a run."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.spans import OLD, NoSpans, SpanFile, SpanRecorder, Spans
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Labels
from benchmarks.record import write_result
from benchmarks.scoring_pool import make_trajectory
from benchmarks.serving import OWN_RUN, load, replay

SPANS, ROUNDS = 10_000, 5
EPISODES = 4096
AT_ONCE = 64
PROMPT, RESPONSE = 32, 32
"""Tokens of an episode, fewer than in any real episode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a run, such as runs/demo: also show the share of its spans")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = nanoseconds(Path(folder))
    result: dict[str, Any] = {"nanoseconds": costs, "replay": replays(), "load": load()}
    if given.run is not None:
        result["run"] = shares(given.run, costs["recorded"] + costs["written"])
    print(json.dumps(result, indent=2))
    print(write_result("spans", result))


def nanoseconds(folder: Path) -> dict[str, float]:
    """Processor time of one span in the recording role, in the writing thread, and with spans turned off."""
    recorder = SpanRecorder(SpanFile(folder / "actor.jsonl", 1 << 30), {"role": "actor"})
    found: dict[str, list[float]] = {name: [] for name in ("off", "recorded", "written", "added")}
    for _ in range(ROUNDS):
        found["off"].append(_each(lambda: blocks(NoSpans())))
        found["recorded"].append(_each(lambda: blocks(recorder)))
        found["written"].append(_each(recorder.flush))
        found["added"].append(_each(lambda: additions(recorder)))
        recorder.flush()
    assert not recorder.lost
    return {name: round(statistics.median(taken)) for name, taken in found.items()}


def blocks(spans: Spans) -> None:
    for _ in range(SPANS):
        with spans.span("generate", episode="t000000012.3.0") as values:
            values |= {"tokens": 100, "version": 3}


def additions(spans: Spans) -> None:
    for _ in range(SPANS):
        spans.add("generate", 1.0, 2.0, episode="t000000012.3.0", tokens=100, version=3)


def _each(act: Callable[[], object]) -> float:
    began = time.process_time_ns()
    act()
    return (time.process_time_ns() - began) / SPANS


def replays() -> dict[str, float]:
    """Processor time of a real replay for each short episode from ticket to plan, alternately with and without spans.
    Of all roles the replay has the most spans for its work."""
    taken: dict[str, list[float]] = {"true": [], "false": []}
    for _ in range(ROUNDS):
        for wanted, seconds in taken.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(_replay_cpu(Path(folder), wanted) / EPISODES)
    on, off = (statistics.median(taken[wanted]) * 1e6 for wanted in ("true", "false"))
    ratios = [a / b for a, b in zip(taken["true"], taken["false"], strict=True)]
    return {"us_on": round(on, 1), "us_off": round(off, 1), "ratio": round(statistics.median(ratios), 3)}


def _replay_cpu(folder: Path, wanted: str) -> float:
    settings = [f"observe.spans={wanted}", "replay.durability=os"]
    with replay(folder, settings=settings) as served:
        client = ReplayClient(served.endpoints[0], "a", "1", run=OWN_RUN)
        before = served.cpu()
        for _ in range(EPISODES // AT_ONCE):
            tickets = client.tickets([], AT_ONCE)
            client.put_all([make_trajectory(ticket, PROMPT, RESPONSE) for ticket in tickets])
            leases = client.lease(["rules"], AT_ONCE, 1 << 20)
            client.label([Labels(lease.trajectory.id, 1.0, 1.0, "benchmark") for lease in leases])
        cpu = served.cpu() - before
        client.close()
    return cpu


def shares(run_dir: Path, cost_ns: float) -> dict[str, float]:
    """The cost of each role's spans in a finished run, as a share of the time from first to last span, and the bytes a
    second that the role wrote."""
    found = {}
    for path in sorted((run_dir / "spans").glob("*.jsonl")):
        files = [each for each in (path.with_name(path.name + OLD), path) if each.exists()]
        lines = [line for each in files for line in each.read_text().splitlines() if line.startswith("[")]
        seconds = _seconds([json.loads(line) for line in lines])
        found[f"{path.stem}_share"] = round(len(lines) * cost_ns / 1e9 / seconds, 6)
        found[f"{path.stem}_bytes_per_s"] = round(sum(each.stat().st_size for each in files) / seconds)
    return found


def _seconds(spans: Sequence[Any]) -> float:
    return float(max(span[2] + span[3] for span in spans) - min(span[2] for span in spans)) / 1e6


if __name__ == "__main__":
    main()
