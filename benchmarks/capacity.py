"""Compares the forecasts of `asyncrl plan` with measured runs.

Each run of `benchmarks.async_vs_sync` in runs/async_vs_sync is forecast from its own rates, which tests the simulation.
With --rates-of it is also forecast from the rates of the run with that age bound, which tests forecasts of other
settings. For this the machine must have done nothing else during all runs.

Forecasts simulate many more steps than the runs have, so chance affects the measured rates only. Their standard error
is printed.

Draws docs/planning.png. Then it times a forecast for 10,000 GPUs.

    python -m benchmarks.capacity
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from msgspec.structs import replace

from asyncrl.capacity.command import STEPS
from asyncrl.capacity.description import RunDescription
from asyncrl.capacity.measured import describe
from asyncrl.capacity.simulation import Forecast, simulate
from asyncrl.capacity.splits import splits
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from asyncrl.runs.run import Run
from benchmarks.async_vs_sync import FIRST, RUNS, figures
from benchmarks.record import write_result

PICTURE = Path("docs/planning.png")
SIMULATED = 300


def forecast(run: RunDescription, max_lag: int) -> Forecast:
    return simulate(replace(run, sizes=replace(run.sizes, max_lag=max_lag)), SIMULATED, FIRST)


def standard_error(max_lag: int) -> float:
    """The standard error of the measured seconds of a step, as a share of their mean."""
    lines = read_lines(metrics_file(RUNS / f"lag-{max_lag}", "learner"))[FIRST:]
    seconds = [line["seconds/step"] for line in lines]
    return float(statistics.stdev(seconds) / len(seconds) ** 0.5 / statistics.mean(seconds))


def compare(max_lag: int, rates_of: int | None) -> dict[str, Any]:
    """The measured figures of the run at one age bound, and its forecasts."""
    measured = {**figures(max_lag), "standard_error": standard_error(max_lag)}
    folders = {"own_rates": RUNS / f"lag-{max_lag}"}
    if rates_of is not None:
        folders[f"rates_of_{rates_of}"] = RUNS / f"lag-{rates_of}"
    row: dict[str, Any] = {"max_lag": max_lag, "measured": measured}
    for name, folder in folders.items():
        found = forecast(describe(Run(folder)), max_lag)
        row[name] = {
            "samples_per_s": found.trajectories_per_s,
            "error": found.trajectories_per_s / measured["samples_per_s"] - 1,
            "learner_idle": found.learner_idle,
            "engine_idle": found.engine_idle,
            "lag_histogram": found.lags,
            "discarded": found.discarded,
        }
    return row


def large(run: RunDescription) -> dict[str, float]:
    """Time `asyncrl plan --gpus 10000 --batch-size 65536`."""
    sizes = replace(run.sizes, batch_size=65536)
    begun, worked = time.perf_counter(), time.process_time()
    rows = [simulate(replace(run, sizes=each), STEPS) for each in splits(replace(run, sizes=sizes), 10_000)]
    return {
        "rows": len(rows),
        "seconds": time.perf_counter() - begun,
        "processor_seconds": time.process_time() - worked,
        "load": os.getloadavg()[0],
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured and the forecast rates and idle shares of each age bound."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("samples_per_s", "trajectories a second"),
        ("learner_idle", "learner idle"),
        ("engine_idle", "engine idle"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3), layout="constrained")
    names = [str(row["max_lag"]) for row in rows]
    for axis, (key, title) in zip(axes, panels, strict=True):
        axis.bar(names, [row["measured"][key] for row in rows], color="#c9d7e8", label="measured")
        axis.plot(names, [row["own_rates"][key] for row in rows], "o", color="#b3402a", label="forecast")
        axis.set(title=title, xlabel="max_lag")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates-of", type=int, metavar="K")
    arguments = parser.parse_args()
    lags = sorted(int(path.name.removeprefix("lag-")) for path in RUNS.glob("lag-*"))
    rows = [compare(max_lag, arguments.rates_of) for max_lag in lags]
    for row in rows:
        found = (f"{name} {each['samples_per_s']:.1f} ({each['error']:+.0%})" for name, each in list(row.items())[2:])
        measured = row["measured"]
        rate = f"{measured['samples_per_s']:.1f} (standard error {measured['standard_error']:.0%}) samples/s"
        print(f"max_lag {row['max_lag']}: {rate}; {', '.join(found)}")
    draw(rows, PICTURE)
    timed = large(describe(Run(RUNS / f"lag-{lags[-1]}")))
    print(
        f"10,000 GPUs, {timed['rows']} rows: {timed['seconds']:.0f} s, {timed['processor_seconds']:.0f} s of one core"
    )
    print(f"written to {write_result('capacity', {'runs': rows, 'gpus_10000': timed})} and {PICTURE}")


if __name__ == "__main__":
    main()
