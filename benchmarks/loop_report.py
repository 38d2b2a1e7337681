"""Makes a table in Markdown, and a picture, from results of benchmarks.gpu_loop.

python -m benchmarks.loop_report runs/gpu_loop/gpu_loop-*.json --picture loop.png
python -m benchmarks.loop_report benchmarks/results/gpu_loop-*.json

The first command shows your results, the second those that asyncrl has published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from benchmarks.loop_result import COLOCATED, in_order, label, read_record

COLUMNS = (
    "max_lag",
    "samples/s",
    "ratio to 0",
    "ratio to colocated",
    "fleet, tokens/s",
    "of the bare rate",
    "fleet idle",
    "learner idle",
    "step (s): train, proximal, wait",
    "MFU of training",
    "push: transfer, switch (s)",
    "stop of a push: median, p95, max (ms)",
    "largest lag",
    "tokens thrown away",
    "mean sampled tokens: sampled, trained, evicted",
)
BASELINES = {"0": "synchronous training", COLOCATED: "colocated synchronous training"}
"""The labels of the rows with which others are compared, and their words."""
MEASURED = 0.005
"""The smallest share of a lag that is drawn."""

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """A line for each row. Ratios are to the two baselines: synchronous training (`max_lag = 0`), and synchronous
    training with turns on the same GPUs. They are missing without their baseline."""
    baselines = rates_of(rows)
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row, baselines) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rates_of(rows: Sequence[Row]) -> Mapping[str, float]:
    """The samples a second of the measured baselines, by their labels."""
    return {name: row["samples_per_s"] for row in rows if (name := label(row)) in BASELINES}


def compared(rows: Sequence[Row]) -> list[str]:
    """A sentence about the fastest row. It compares the row with each measured baseline, and with a bare client. There
    is none without another row than baselines."""
    others, baselines = [row for row in rows if label(row) not in BASELINES], rates_of(rows)
    if not others:
        return []
    best = max(others, key=lambda row: row["samples_per_s"])
    ratios = [
        f"{best['samples_per_s'] / baselines[name]:.2f} times {words}"
        for name, words in BASELINES.items()
        if name in baselines
    ]
    shares = [*ratios, f"{best['fleet_to_bare']:.0%} of the tokens/s of a bare client"]
    return [f"fastest: max_lag {label(best)}, {best['samples_per_s']:.2f} samples/s, {', '.join(shares)}"]


def _cells(row: Row, baselines: Mapping[str, float]) -> tuple[str, ...]:
    seconds, push = row["seconds_of_a_step"], row["push"]
    return (
        label(row),
        f"{row['samples_per_s']:.2f}",
        *(f"{row['samples_per_s'] / baselines[name]:.2f}" if name in baselines else "" for name in BASELINES),
        f"{row['fleet_tokens_per_s']:,.0f}",
        f"{row['fleet_to_bare']:.0%}",
        f"{row['fleet_idle']:.0%}",
        f"{row['learner_idle']:.0%}",
        f"{seconds['step']:.2f}: {seconds['train']:.2f}, {seconds['proximal']:.2f}, {seconds['wait']:.2f}",
        f"{row['mfu']['train']:.1%}" if "train" in row["mfu"] else "",
        f"{push['transfer_s']:.3f}, {push['switch_s']:.3f}" if "switch_s" in push else "",
        stops(push),
        str(max(map(int, row["token_lags"]), default=0)),
        f"{row['thrown_away_tokens'] or 0:,.0f}{_percent(row.get('thrown_away_share'))}",
        lengths(row.get("decided", {})),
    )


def _percent(share: float | None) -> str:
    """A share of tokens in brackets; empty if it is not known."""
    return "" if share is None else f" ({share:.1%})"


def lengths(decided: Mapping[str, Row]) -> str:
    """The mean lengths of sampled, trained and evicted episodes; empty if no episode was evicted."""
    if "evicted" not in decided:
        return ""
    return ", ".join(f"{decided[end]['length']:,.0f}" for end in ("sampled", "trained", "evicted") if end in decided)


def stops(push: Row) -> str:
    """Milliseconds of the stops of a server by pushes: median, p95, max; empty if no stop was measured."""
    return ", ".join(f"{1000 * push[f'pause_{name}_s']:.0f}" for name in ("median", "p95", "max") if "pauses" in push)


def draw(results: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw rates, idle shares and lags by row, for each result by its name."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rate, idle, lags) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    # The x axis has the rows of all results in order, evenly spaced.
    every = list(dict.fromkeys(map(label, sorted((row for rows in results.values() for row in rows), key=in_order))))
    for axes in (rate, idle):
        axes.set_xticks(range(len(every)), every)
    for number, (name, rows) in enumerate(results.items()):
        bounds, color = [every.index(label(row)) for row in rows], f"C{number}"
        rate.plot(bounds, [row["samples_per_s"] for row in rows], "o-", color=color, label=name)
        idle.plot(bounds, [row["learner_idle"] for row in rows], "o-", color=color, label=f"learner, {name}")
        idle.plot(bounds, [row["fleet_idle"] for row in rows], "s--", color=color, label=f"fleet, {name}")
        last = rows[-1]
        shares = {int(lag): share for lag, share in last["token_lags"].items() if share >= MEASURED}
        lags.plot(list(shares), list(shares.values()), "o-", color=color, label=f"{name}, max_lag {label(last)}")
    for axes, title, along in (
        (rate, "trained samples a second", "max_lag"),
        (idle, "share of the time without work", "max_lag"),
        (lags, "share of trained tokens", "lag (versions)"),
    ):
        axes.set(title=title, xlabel=along, ylim=(0, None))
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(name: str, record: Mapping[str, Any]) -> None:
    result = record["result"]
    engine = f"SGLang {result['sglang']}" if result["sglang"] else "embedded engine"
    print(f"{name}, {record['machine']}, {record['date']}, {engine}:", end=" ")
    print(f"a bare client gets {result['bare_tokens_per_s']:,.0f} tokens/s\n")
    print(table(result["rows"]) if result["rows"] else "nothing was measured\n")
    for line in compared(result["rows"]):
        print(f"{line}\n")
    for name, reason in result["failed"].items():
        print(f"max_lag {name}: {reason}\n")


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Files by their names, or by their paths if two files have the same name."""
    stems = [path.stem for path in paths]
    return {str(path) if stems.count(path.stem) > 1 else path.stem.removeprefix("gpu_loop-"): path for path in paths}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    options = parser.parse_args(arguments)
    try:
        records = {name: read_record(path) for name, path in _named(options.results).items()}
    except DataError as error:
        sys.exit(str(error))
    for name, record in records.items():
        show(name, record)
    measured = {name: rows for name, record in records.items() if (rows := record["result"]["rows"])}
    if options.picture and measured:
        draw(measured, options.picture)


if __name__ == "__main__":
    main()
