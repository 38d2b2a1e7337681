"""A small run whose spans are known: one batch of two groups, and the wait of the learner for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.observe.spans import spans_file

BEGIN = 1_000_000_000
"""The beginning of the run, in seconds since 1970."""
REPLAY = "tcp://replay"
Line = list[Any] | dict[str, Any]


def line(name: str, track: str, start: float, end: float, **values: Any) -> Line:
    """A span by its seconds after the beginning of the run."""
    return [name, track, round((BEGIN + start) * 1e6), round((end - start) * 1e6), values]


def process(role: str, **values: Any) -> Line:
    return {"role": role, "host": role, "started": BEGIN * 1_000_000, "dropped": 0, "endpoint": "", **values}


def clock(at: float, ahead: float, peer: str = REPLAY) -> Line:
    return {"clock": round((BEGIN + at) * 1e6), "peer": peer, "ahead": round(ahead * 1e6), "round_trip": 100}


def write(run_dir: Path, role: str, lines: Iterable[Line]) -> Path:
    path = spans_file(run_dir, role)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


def episode(name: str, start: float, seconds: float, ahead: float) -> list[Line]:
    """Return the lines that an actor records of an episode whose tool takes half of the time.

    The actor's clock is `ahead` of the replay's.
    """
    start, tool = start + ahead, seconds / 2
    turn = (seconds - tool - 1.0) / 2
    return [
        line("queued", "", start, start + 0.5, episode=name),
        line("generate", "", start + 0.5, start + 0.5 + turn, episode=name, tokens=10, version=3),
        line("tool search", "", start + 0.5 + turn, start + 0.5 + turn + tool, episode=name),
        line("tool search", "", start + 0.5 + turn, start + 0.5 + turn + tool / 2, episode=name),
        line("tools", "", start + 0.5 + turn, start + 0.5 + turn + tool, episode=name),
        line("generate", "", start + 0.5 + turn + tool, start + seconds - 0.5, episode=name, tokens=5, version=3),
        line("deliver", "", start + seconds - 0.5, start + seconds, episode=name),
        line("episode", "", start, start + seconds, episode=name, task="task-1", tokens=40),
    ]


def write_run(run_dir: Path, ahead: float = 0.0) -> None:
    """Step 7 waits 50 s for `t2.0.0`, an episode of 60 s. The clock of the actor is `ahead` of the replay's."""
    names = ("t1.0.0", "t2.0.0")
    write(
        run_dir,
        "actor-0",
        [
            process("actor-0"),
            clock(0.0, -ahead),
            *episode(names[0], 5.0, 10.0, ahead),
            *episode(names[1], 10.0, 60.0, ahead),
        ],
    )
    write(
        run_dir,
        "replay",
        [
            process("replay", endpoint=REPLAY),
            line("ticket", "ticket", 5.0, 15.0, episode=names[0], worker="actor-0", outcome="stored"),
            line("label queue", "label queue", 15.0, 16.0, episode=names[0]),
            line("label", "label", 16.0, 17.0, episode=names[0], worker="scoring-0"),
            line("ticket", "ticket", 10.0, 70.0, episode=names[1], worker="actor-0", outcome="stored"),
            line("no episodes", "learner waits", 25.0, 70.0),
            line("label queue", "label queue", 70.0, 73.0, episode=names[1]),
            line("label", "label", 73.0, 75.0, episode=names[1], worker="scoring-0"),
            line("no labels", "learner waits", 70.0, 75.0),
            line("ready", "ready", 17.0, 75.0, group="t1", step=7, episodes=[names[0]]),
            line("ready", "ready", 75.0, 75.0, group="t2", step=7, episodes=[names[1]]),
            line("plan", "plans", 75.0, 75.0, step=7, version=3, episodes=2),
        ],
    )
    write(
        run_dir,
        "learner",
        [
            process("learner"),
            clock(0.0, 0.0),
            line("wait", "steps", 25.0, 75.0, step=7),
            line("fetch", "steps", 75.1, 76.1, step=7),
            line("train", "steps", 76.1, 85.0, step=7),
            line("step", "steps", 25.0, 85.0, step=7, version=3),
        ],
    )
