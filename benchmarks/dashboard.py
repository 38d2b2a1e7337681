"""Measures how soon the page of a long run shows figures, and the cost of an open page for a running run.

A run has `--steps` recorded steps with as many metrics as the demo's, and an actor, a scorer and a replay. A headless
Chromium opens each tab: the time is from the start of the navigation until every visible figure is drawn. Then the
learner writes a row a second for `--seconds` while the page is open: reported is the server's processor time in shares
of one core. The browser is not counted, since it usually runs on another machine.

    python -m benchmarks.dashboard --steps 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.observe.sinks import metrics_file
from benchmarks.record import write_result
from tests.dashboard.browser import Browser, browser

METRICS = 80
EVERY_S = 5.0
TABS = ("overview", "figures")
BLOCK = 1000
DRAWN = """(() => {
  const within = [...document.querySelectorAll('article:not([hidden]) canvas')]
    .filter((canvas) => canvas.getBoundingClientRect().top < innerHeight);
  const inked = (canvas) => new Uint32Array(
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer).some(Boolean);
  return within.length > 3 && within.every(inked) ? performance.now() / 1000 : 0;
})()"""


@dataclass(frozen=True)
class Result:
    """Results: `first_figures_s` by tab with an empty browser cache, `again_s` with a full one. `server_share` is the
    share of a core while the run is running, `idle_share` while it is not."""

    steps: int
    gigabytes: float
    first_figures_s: dict[str, float]
    again_s: dict[str, float]
    zoom_s: float
    server_share: float
    idle_share: float


def learner_row(step: int, chance: random.Random) -> dict[str, Any]:
    """A row as the learner writes it."""
    known = {"reward/mean": step / 1e6 + chance.random() / 5, "reward/min": 0.0, "reward/max": 1.0, "idle": 0.3}
    known |= {f"lag/{lag}": float(chance.randrange(64)) for lag in range(4)}
    known |= {f"seconds/{phase}": chance.random() for phase in ("wait", "train", "publish", "step")}
    known |= {"trajectories_trained": 64.0 * step, "tokens": 5628.0, "mismatch/kl": chance.random() / 100}
    others = {f"measured/number_{index}": chance.random() for index in range(METRICS - len(known))}
    return {"step": step, "time": 1.7e9 + step * EVERY_S, **known, **others}


def write_run(folder: Path, steps: int) -> None:
    """Write the metrics of a run. Blocks of rows repeat except for steps and times."""
    chance = random.Random(0)
    block = [learner_row(step, chance) for step in range(BLOCK)]
    tails = [json.dumps({name: value for name, value in row.items() if name not in ("step", "time")}) for row in block]
    metrics_file(folder, "learner").parent.mkdir(parents=True)
    with metrics_file(folder, "learner").open("w") as file:
        file.writelines(_rows(tails, steps))
    for role in ("actor-0", "scoring-0", "replay"):
        others = [
            json.dumps({"version": 1.0, "tokens_per_s": chance.random(), "idle": 0.1, "accepted": 8}) for _ in block
        ]
        with metrics_file(folder, role).open("w") as file:
            file.writelines(_rows(others, steps))


def _rows(tails: list[str], steps: int) -> Iterator[str]:
    for step in range(steps):
        yield f'{{"step": {step}, "time": {1.7e9 + step * EVERY_S}, {tails[step % len(tails)][1:]}\n'


async def first_figures(page: Browser, url: str, tab: str, more: str = "") -> float:
    """Seconds from the start of the navigation until all figures in the window are drawn."""
    await page.open("about:blank")
    await page.open(f"{url}#tab={tab}{more}")
    return float(await page.until(DRAWN))


async def watch(page: Browser, server: psutil.Process, folder: Path, seconds: float, steps: int) -> float:
    """The server's share of a core while the page is open. The learner writes a row a second, or none if `steps` is
    0."""
    chance = random.Random(1)
    before, began = _seconds(server), time.perf_counter()
    with metrics_file(folder, "learner").open("a") as file:
        while time.perf_counter() - began < seconds:
            if steps:
                steps += 1
                file.write(json.dumps(learner_row(steps, chance)) + "\n")
                file.flush()
            await asyncio.sleep(1)
    assert page.errors == []
    return (_seconds(server) - before) / (time.perf_counter() - began)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(folder: Path, steps: int, seconds: float) -> Result:
    """All figures of one run."""
    command = [sys.executable, "-m", "asyncrl", "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = await asyncio.to_thread(server.stdout.readline)
        url = line[line.index("http://") :].strip()
        first = {}
        for tab in TABS:
            async with browser() as page:
                await page.resize(1280, 900)
                first[tab] = await first_figures(page, url, tab)
        async with browser() as page:
            await page.resize(1280, 900)
            await first_figures(page, url, TABS[0])
            again = {tab: await first_figures(page, url, tab) for tab in TABS}
            zoom = await first_figures(page, url, "figures", f"&range={steps // 2}..{steps // 2 + 500}")
            await first_figures(page, url, "figures")
            idle = await watch(page, psutil.Process(server.pid), folder, seconds, 0)
            busy = await watch(page, psutil.Process(server.pid), folder, seconds, steps)
        server.terminate()
    size = sum(path.stat().st_size for path in (folder / "metrics").iterdir()) / 1e9
    return Result(steps, round(size, 2), first, again, zoom, busy, idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="recorded steps (1,000,000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch the running run (60)")
    parser.add_argument("--dir", help="folder for the run, of several gigabytes (the system's temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        run = Path(folder) / "long"
        write_run(run, given.steps)
        result = asyncio.run(measure(run, given.steps, given.seconds))
    print(json.dumps(asdict(result), indent=2))
    print(write_result("dashboard", asdict(result)))


if __name__ == "__main__":
    main()
