"""`asyncrl plan RUN [--gpus N]`: forecasts the speed of a run on another number of GPUs, or with a different age bound.

It simulates the run from measurements: the lengths of its episodes, the delays of its tools, the speed of its engines,
scorers and learner. It runs the replay's own code for tickets, groups, samplers and batch plans.

With --gpus it tries several numbers of learner GPUs, and marks the fastest forecast. --save writes rates and sizes to a
file, which you can edit and pass instead of the run. docs/cluster.md describes the limits of the forecasts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from asyncrl.capacity.description import (
    TREATMENT_NAMES,
    RunDescription,
    Sizes,
    read_description,
    write_description,
)
from asyncrl.capacity.measured import ENOUGH_STEPS, MORE_STEPS, describe
from asyncrl.capacity.simulation import Forecast, simulate
from asyncrl.capacity.splits import splits, with_learner
from asyncrl.config.commands import command_name
from asyncrl.config.keys import did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.runs.finding import find_run

STEPS = 20
CHANGED = ("batch_size", "group_size", "publish_every", "concurrency", "engine_gpus", "scorers")
BEYOND = 1.5
"""A forecast is uncertain if an engine has many more requests than in the measured run: more than this multiple of the
largest number with which its speed was measured."""
MANY = 0.9
WASTEFUL = 0.2
"""The share of discarded tokens above which the notes do not recommend more engines."""
SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
"""Matches the KEY= at the beginning of a word KEY=VALUE."""
PROGRESS_S = 10.0
"""The seconds between two lines of progress outside of a terminal."""
TABLE_WIDTH = 110
HEADERS = (
    "learner\nGPUs",
    "\nengines",
    "max\nlag",
    "old\ngroups",
    "s a\nstep",
    "trajectories\na second",
    "idle:\nlearner",
    "\nengines",
    "\nscorers",
    "thrown\naway",
    "mean\nlag",
    "1,000 steps:\nGPU hours",
)


def main(argv: Sequence[str]) -> None:
    """Run the command line. Wrong arguments end the process with status 2, other failures with 1."""
    given = _parsed(argv)
    run = _description(given.source)
    if given.save is not None:
        write_description(run, given.save)
    run = replace(run, sizes=_changed(run.sizes, given))
    forecasts = list(_forecasts(run, list(_planned(run, given)), given.steps, ForecastProgress(sys.stderr)))
    if given.json:
        sys.stdout.write(json.dumps([as_json(each, given.price) for each in forecasts]) + "\n")
    else:
        console = Console(width=max(TABLE_WIDTH, Console().width))
        show(run, forecasts, given.price, console, given.gpus or 0, given.host_gpus or 0)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Ends the process with status 2 if they are wrong."""
    parser = _parser()
    given, rest = parser.parse_known_intermixed_args(words)
    options = [f"--{name.replace('_', '-')}" for name in vars(given) if name not in ("runs", "source")]
    for word in (*rest, *given.runs):
        if word.startswith("-") or (SETTING.match(word) and not Path(word).exists()):
            key, _, value = word.partition("=")
            option = "--" + key.lstrip("-").rpartition(".")[2].replace("_", "-")
            known = f"; did you mean {f'{option} {value}'.strip()}?"
            parser.error(
                f"{word}: there is no such option{known if option in options else did_you_mean(option, options)}"
            )
    sources = [*given.runs, *([given.source] if given.source else [])]
    if len(sources) > 1:
        parser.error(f"{' '.join(sources)}: name one run")
    if given.host_gpus and not given.gpus:
        parser.error("--host-gpus: also give the number of GPUs of all hosts with --gpus")
    given.source = sources[0] if sources else None
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN|FILE", help="a run (its folder or name), or a file that --save wrote")
    add("--from", dest="source", metavar="RUN|FILE", help="the same as the argument")
    add("--gpus", type=_count, metavar="N", help="GPUs of engines and learner together (default: as in the run)")
    add("--host-gpus", type=_count, metavar="N", help="GPUs per host: engines and learner get whole hosts")
    add(
        "--learner-gpus",
        type=_count,
        nargs="+",
        metavar="N",
        help="GPUs of the learner among --gpus (default: several numbers are tried)",
    )
    add("--max-lag", type=_natural, nargs="+", metavar="K", help="age bounds, replay.max_lag (default: as in the run)")
    add(
        "--old-groups",
        choices=TREATMENT_NAMES,
        nargs="+",
        metavar="HOW",
        help="treatments of groups that become too old (replay.old_groups): evict, wait, mask, or both (a wait, then "
        "the mask); default: as in the run. A wait has the run's limit, or else the time for which a step trains",
    )
    add("--batch-size", type=_count, metavar="B", help="trajectories per batch, learner.batch_size")
    add("--group-size", type=_count, metavar="G", help="trajectories per group, learner.group_size")
    add("--publish-every", type=_count, metavar="S", help="learner steps between two versions of the weights")
    add("--concurrency", type=_count, metavar="C", help="episodes that one engine runs at once")
    add(
        "--engine-gpus",
        type=_count,
        metavar="N",
        help="GPUs per engine (the forecast keeps the measured speed of an engine)",
    )
    add(
        "--scorers",
        type=_count,
        metavar="N",
        help="scoring processes of the run (they grow with --gpus in proportion to the engines)",
    )
    add("--steps", type=_count, default=STEPS, metavar="S", help=f"learner steps to simulate ({STEPS})")
    add("--price", type=_price, metavar="P", help="price of a GPU for an hour")
    add("--save", type=Path, metavar="FILE", help="write the rates and sizes of the run to a YAML file")
    add("--json", action="store_true", help="print JSON, with the shares of all lags")
    return parser


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a price")
    return price


def _description(source: str | None) -> RunDescription:
    if source is None:
        raise ConfigError(
            "name the run that has the rates, such as `asyncrl plan runs/NAME`; `asyncrl train KEY=VALUE ... --plan` "
            "shows where processes would run, and needs no run"
        )
    run = find_run(source)
    if run is not None:
        return describe(run)
    if not Path(source).is_file():
        raise ConfigError(f"{source}: there is no such run, and no such file; name the folder of a run")
    return read_description(Path(source))


class ForecastProgress:
    """Shows the progress of the forecasts: one changing line in a terminal, else a new line every `PROGRESS_S` seconds.
    `clock` gives seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock, self._shown = out, clock, clock()

    def update(self, number: int, count: int, share: float) -> None:
        """Show how much of forecast `number` (counted from 1) of `count` is done: `share`, from 0 to 1."""
        text = f"forecast {number} of {count}: {share:4.0%}"
        if self._out.isatty():
            self._out.write(f"\r{text}" + "\n" * (number == count and share == 1))
            self._out.flush()
        elif self._clock() - self._shown >= PROGRESS_S:
            self._shown = self._clock()
            self._out.write(f"{text}\n")
            self._out.flush()


def _forecasts(
    run: RunDescription, planned: Sequence[Sizes], steps: int, progress: ForecastProgress
) -> Iterator[Forecast]:
    """Yield the forecasts in order. A large forecast takes up to a minute."""
    for number, sizes in enumerate(planned, 1):
        update = partial(progress.update, number, len(planned))
        update(0.0)
        yield simulate(replace(run, sizes=sizes), steps, progress=update)


def _changed(sizes: Sizes, given: argparse.Namespace) -> Sizes:
    changes = {name: getattr(given, name) for name in CHANGED if getattr(given, name) is not None}
    try:
        return replace(sizes, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _planned(run: RunDescription, given: argparse.Namespace) -> Iterator[Sizes]:
    for max_lag, treatment in _cases(given.max_lag or [run.sizes.max_lag], given.old_groups):
        sizes = _treated(run.sizes, treatment, max_lag)
        gpus, host_gpus = given.gpus or sizes.gpus, given.host_gpus or 1
        if given.learner_gpus:
            yield from (with_learner(sizes, gpus, learner, host_gpus) for learner in given.learner_gpus)
        elif given.gpus:
            yield from splits(replace(run, sizes=sizes), gpus, host_gpus)
        else:
            yield sizes


def _cases(lags: Sequence[int], treatments: Sequence[str] | None) -> Iterator[tuple[int, str | None]]:
    """Every age bound with every treatment of old groups. With an age bound of 0 (synchronous training), no group
    becomes too old, so all treatments are the same as `evict`."""
    for max_lag in lags:
        if treatments is None:
            yield max_lag, None
        else:
            yield from ((max_lag, treatment) for treatment in (treatments if max_lag else ["evict"]))


def _treated(sizes: Sizes, treatment: str | None, max_lag: int) -> Sizes:
    """The sizes with another age bound, and with another treatment of old groups if one is given."""
    try:
        if treatment is None:
            return replace(sizes, max_lag=max_lag)
        return sizes.treated(treatment, max_lag)
    except ValueError as error:
        raise ConfigError(
            f"{f'--old-groups {treatment} ' if treatment else ''}--max-lag {max_lag}: {error}. --old-groups evict "
            "forecasts that setting"
        ) from error


def as_json(forecast: Forecast, price: float | None) -> dict[str, object]:
    """Turn a forecast into plain values for JSON."""
    values: dict[str, object] = msgspec.to_builtins(forecast, str_keys=True)
    values["gpu_hours_per_step"] = forecast.gpu_hours_per_step
    if price is not None:
        values["price_per_step"] = forecast.gpu_hours_per_step * price
    return values


def show(
    run: RunDescription,
    forecasts: Sequence[Forecast],
    price: float | None,
    console: Console,
    gpus: int = 0,
    host_gpus: int = 0,
) -> None:
    """Print a table with notes. `gpus` and `host_gpus` are the values of the options --gpus and --host-gpus, 0 if not
    given."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in (*HEADERS, *(["price"] if price is not None else [])):
        table.add_column(header, justify="right", no_wrap=True)
    fastest = max(forecasts, key=lambda each: each.trajectories_per_s)
    for each in forecasts:
        style = "bold green" if each is fastest and len(forecasts) > 1 else None
        table.add_row(*_cells(each, price), style=style)
    console.print(table)
    said = [
        *notes(run, forecasts, fastest),
        *_of_gpus([each.sizes for each in forecasts], fastest.sizes, gpus, host_gpus),
    ]
    for note in said:
        console.print(f"\n{note}", highlight=False, soft_wrap=True)


def _cells(forecast: Forecast, price: float | None) -> Iterator[str]:
    sizes = forecast.sizes
    yield from (f"{sizes.learner_gpus:,}", f"{sizes.engines:,}", f"{sizes.max_lag}", sizes.treatment)
    yield f"{forecast.seconds_per_step:,.3g}"
    yield f"{forecast.trajectories_per_s:,.1f}"
    idle = (forecast.learner_idle, forecast.engine_idle, forecast.scorer_idle)
    # Rounding can make the share of a learner that never waits slightly negative.
    yield from (f"{max(0.0, share):.0%}" for share in idle)
    yield f"{forecast.discarded:.0%}"
    yield f"{sum(lag * share for lag, share in forecast.lags.items()):.1f}"
    hours = 1000 * forecast.gpu_hours_per_step
    yield f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}"
    if price is not None:
        yield f"{hours * price:,.2f}"


def notes(run: RunDescription, forecasts: Sequence[Forecast], fastest: Forecast) -> Iterator[str]:
    """Yield notes on the bottleneck of the fastest forecast, and on forecasts outside of the measured range."""
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in fastest.lags.items())
    sizes, decided = fastest.sizes, fastest.decided
    if len(forecasts) > 1:
        yield (
            f"Fastest: learner GPUs {sizes.learner_gpus:,}, engines {sizes.engines:,}, max_lag {sizes.max_lag}, old "
            f"groups {sizes.treatment}."
        )
    if waiting := [each.sizes for each in forecasts if each.sizes.treatment in ("wait", "both")]:
        limit = waiting[0].wait_s  # All forecasts have the same limit: the run's, or the default.
        longest = "the time for which the learner trains a step" if limit is None else f"{limit:g} s"
        yield (
            f"With --old-groups wait or both, a step waits for old groups for at most {longest}. For another limit, "
            "change wait_s in the file that --save writes, and name this file instead of the run."
        )
    yield f"Lags of the trained trajectories of the fastest forecast: {lags}."
    if "evicted" in decided:
        lengths = ", ".join(f"{end} {each['length']:,.0f}" for end, each in decided.items())
        yield f"Mean sampled tokens of an episode of the fastest forecast: {lengths}."
    if fastest.biased:
        by = " and ".join(fastest.biased)
        yield f"In the fastest forecast the age bound chooses the trained episodes by {by}: they are a biased sample."
    room = sizes.engines * sizes.concurrency
    if fastest.learner_idle < 1 - MANY:
        yield "The learner limits the fastest forecast: give it more GPUs, or make its step faster."
    elif sizes.admitted < room / 2 and fastest.engine_idle > 1 - MANY:
        yield (
            f"The age bound limits the fastest forecast: it lets {sizes.admitted:,.0f} episodes run, and the engines "
            f"have room for {room:,}. A larger learner.batch_size or replay.max_lag fills them."
        )
    elif fastest.scorer_idle < 1 - MANY:
        yield "The scorers limit the fastest forecast: start more of them."
    elif fastest.engine_idle < 1 - MANY and fastest.discarded > WASTEFUL:
        yield (
            f"The engines of the fastest forecast are busy, and {fastest.discarded:.0%} of the sampled tokens are "
            "thrown away: a larger replay.max_lag or fewer episodes at once (--concurrency) would throw away less."
        )
    elif fastest.engine_idle < 1 - MANY:
        yield "The engines limit the fastest forecast: give them more GPUs."
    if steps := run.rates.steps:
        more = f", which is few: {MORE_STEPS.format('RUN')}" if steps < ENOUGH_STEPS else ""
        yield f"The rates are means over {steps:,} measured learner steps{more}."
    most = max(each.requests for each in forecasts)
    if run.rates.requests and most > BEYOND * run.rates.requests[-1]:
        yield (
            f"An engine has up to {most:.0f} requests in these forecasts, but its speed was measured with at most "
            f"{run.rates.requests[-1]:.0f}, so the forecasts are less certain."
        )


def _of_gpus(rows: Sequence[Sizes], fastest: Sizes, gpus: int, host_gpus: int) -> Iterator[str]:
    """Yield notes on unused GPUs, and the options of `asyncrl train` that divide the GPUs as in the fastest row."""
    unused = {each.learner_gpus: gpus - each.gpus for each in rows if each.gpus < gpus}
    if unused:
        each = ", ".join(f"{count} at {learner:,} learner GPUs" for learner, count in unused.items())
        yield f"Engines of {fastest.engine_gpus} GPUs leave some of {gpus:,} GPUs unused: {each}."
    if host_gpus:
        train = fastest.learner_gpus // host_gpus
        nodes = {"train": train, "rollout": gpus // host_gpus - train}
        pools = ", ".join(f"{name}: {{nodes: {count}, gpus: {host_gpus}}}" for name, count in nodes.items())
        yield f"Options for the fastest forecast: cluster.pools='{{{pools}}}' cluster.roles='{{actor: rollout}}'"
