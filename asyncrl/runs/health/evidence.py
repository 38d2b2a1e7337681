"""Reads the rows of metrics by which a run's health is judged. The cost does not grow with the length of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from asyncrl.errors import ConfigError
from asyncrl.replay.batches.selection import Selection
from asyncrl.runs.lines import Row, finite
from asyncrl.runs.run import Run

MOST_STEPS = 10
"""The maximum number of steps over which a value at the beginning or at the end of a run is averaged."""
NEWEST = 50
SPREAD = 150
"""The numbers of the learner's rows that are read: NEWEST at the end, SPREAD evenly spread over the run."""
MOST_EVALUATIONS = 200
MOST_ACTORS = 64
ACTOR_ROWS = 60
"""The number of an actor's newest rows that are read. An actor writes a row every five seconds."""
SCORER_ROWS = 12
STALE_S, STALE_VERSIONS = 60.0, 3
"""An actor counts as ended, and is left out, if its newest row is older than the newest row of all actors in two ways:
by more than STALE_S seconds, and by more than STALE_VERSIONS policy versions. The time alone is not evidence, since a
host's clock may be ahead. The version alone is not evidence, since small runs train many steps between two rows."""
TRUNCATED = (("truncated",), ("episodes",))
MALFORMED = (("tool_malformed", "tool_unknown"), ("tool_calls",))
"""Each is two groups of an actor's counters. A share is the sum of the first group, divided by that of the second."""
SHARES = {"truncated": TRUNCATED, "malformed calls": MALFORMED}
ENOUGH = 100
"""A share covers about this number of the newest episodes or calls."""
COUNTED = ("accepted", "labelled", "trained", "filtered", "dead", "failures")
TEXTS = ("newest_failure", "refusing", "solved")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The rows of a run at one moment. A row lacks the metrics that its role has not measured.

    - `folder`: the run's folder, for the commands in sentences.
    - `first`, `newest`: consecutive rows of trained steps at the beginning and at the end; `spread`: rows that are
      evenly spread over the whole run. `evaluations`: the first, the last and other evaluations, by step.
    - `actors`: the newest rows of each actor.
    - `counts`: the replay's counters, summed over shards. `newest_failure`, `refusing` and `solved` are texts of the
      replay.
    - `selection`: sums over the decided episodes (`asyncrl.replay.batches.selection`).
    - `scores`: the newest mean of each score that is not always 0. `unread`: advice by the name of the score, for
      each score that has no effect on the training.
    - `group_size`: `None` if it is unknown.
    - `is_running`: true if the run may still change. Then a few rows are not enough for a warning.
    """

    folder: str
    first: Sequence[Row] = ()
    newest: Sequence[Row] = ()
    spread: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    actors: Sequence[Sequence[Row]] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    newest_failure: str = ""
    refusing: str = ""
    solved: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    group_size: int | None = None
    is_running: bool = False


def read_evidence(run: Run, is_running: bool) -> Evidence:
    """Read the evidence of a run. Raises OSError: a file cannot be read."""
    replays = [run.newest_values(role) for role in run.roles("replay*")]
    settings = None
    with suppress(ConfigError):
        settings = run.settings()
    scored = {
        name: value for role in run.roles("scoring-*") for name, value in _means(run.newest_rows(role, SCORER_ROWS))
    }
    texts = {name: next((str(row[name]) for row in replays if row.get(name)), "") for name in TEXTS}
    return Evidence(
        str(run.folder),
        first=_trained(run.oldest_rows("learner", MOST_STEPS)),
        newest=_trained(run.newest_rows("learner", NEWEST)),
        spread=_trained(run.spread_rows("learner", SPREAD)),
        evaluations=sorted(run.spread_rows("evaluation", MOST_EVALUATIONS), key=lambda row: row["step"]),
        actors=_of_actors(run),
        counts={name: sum(finite(row.get(name)) or 0 for row in replays) for name in COUNTED},
        selection=Selection.from_values(replays),
        newest_failure=texts["newest_failure"],
        refusing=texts["refusing"],
        solved=texts["solved"] if all(row.get("solved") for row in replays) else "",
        scores=scored,
        unread=settings.unread if settings else {},
        group_size=settings.group_size if settings else None,
        is_running=is_running,
    )


def _trained(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "reward/mean" in row]


def _means(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Yield the name of each score in a scorer's rows with its mean, unless the mean is 0."""
    for row in rows:
        yield from ((name.removesuffix("_mean"), row[name]) for name in row if name.endswith("_mean") and row[name])


def _of_actors(run: Run) -> list[Sequence[Row]]:
    names = run.roles("actor-*")
    chosen = names[:: -(-len(names) // MOST_ACTORS) or 1]
    return not_ended([rows for name in chosen if (rows := run.newest_rows(name, ACTOR_ROWS))])


def not_ended(actors: Sequence[Sequence[Row]]) -> list[Sequence[Row]]:
    """Leave out the rows of the actors that have ended while others went on."""
    newest_s = max((rows[-1]["time"] for rows in actors), default=0.0)
    # An actor logs each row at the version that it serves.
    newest_version = max((rows[-1]["step"] for rows in actors), default=0)
    return [
        rows
        for rows in actors
        if newest_s - rows[-1]["time"] <= STALE_S or newest_version - rows[-1]["step"] <= STALE_VERSIONS
    ]


def recent_counts(
    actors: Sequence[Sequence[Row]], part: Sequence[str], whole: Sequence[str], enough: float = ENOUGH
) -> tuple[float, float]:
    """Sum the counters named in `part`, and those named in `whole`, over the newest work of all actors. For each actor,
    this goes back in its rows until `whole` has grown by `enough`, divided by the number of actors. If it has not grown
    so much, this counts all work since the actor's newest start, at which the counters began at 0."""
    parts = wholes = 0.0
    for rows in actors:
        now, since = (_sum(rows[-1], part), _sum(rows[-1], whole)), (0.0, 0.0)
        for row in reversed(rows[:-1]):
            before = _sum(row, part), _sum(row, whole)
            if before[1] > now[1]:  # The row is from an earlier start of the actor.
                break
            if now[1] - before[1] >= enough / len(actors):
                since = before
                break
        parts, wholes = parts + now[0] - since[0], wholes + now[1] - since[1]
    return parts, wholes


def recent_shares(actors: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Map each name in `SHARES` to its share of the newest episodes or tool calls. A name is left out if there
    were no episodes or calls."""
    counts = {name: recent_counts(actors, part, whole) for name, (part, whole) in SHARES.items()}
    return {name: found / of for name, (found, of) in counts.items() if of}


def _sum(row: Row, names: Sequence[str]) -> float:
    return sum(finite(row.get(name)) or 0.0 for name in names)
