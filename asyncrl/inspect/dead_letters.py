"""`asyncrl replay dead-letters`, `requeue` and `discard`: attempts that were given up, and what becomes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs
from rich.markup import escape
from rich.table import Table

from asyncrl.errors import RefusedError
from asyncrl.inspect.target import Live
from asyncrl.inspect.text import printable
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.records import DeadLetter
from asyncrl.replay.shards import shard_of

BACK = {"scoring": "is scored again", "task": "its task runs again as a new group"}


def describe(letters: Iterable[tuple[str, DeadLetter]]) -> list[dict[str, Any]]:
    """Dead letters as plain values; `attempts` is how often that member had failed by then."""
    return [{"id": name, **structs.asdict(letter), "attempts": letter.attempt + 1} for name, letter in letters]


def table(letters: Sequence[tuple[str, DeadLetter]]) -> Table:
    """Dead letters for a terminal."""
    found = Table(
        box=None, pad_edge=False, header_style="dim", title=f"{len(letters)} dead letters", title_justify="left"
    )
    for column in ("id", "failed in", "attempts", "reason"):
        found.add_column(column, justify="right" if column == "attempts" else "left", no_wrap=column == "id")
    for name, letter in letters:
        what = "scoring" if letter.scoring else "episode"
        found.add_row(name, what, str(letter.attempt + 1), escape(printable(letter.reason)))
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one dead letter; `refused` tells that nothing did, and `told` why."""

    id: str
    told: str
    refused: bool = False


def requeue(live: Live, shards: int, names: Sequence[str]) -> list[Outcome]:
    """Put dead letters back, through the replay. Raises UnavailableError: it does not run."""
    return _each(live, shards, names, lambda client, name: BACK[client.requeue(name)])


def discard(live: Live, shards: int, names: Sequence[str]) -> list[Outcome]:
    """Forget dead letters and their episodes, through the replay. Raises UnavailableError: it does not run."""

    def forget(client: ReplayClient, name: str) -> str:
        client.discard(name)
        return "is discarded"

    return _each(live, shards, names, forget)


def _each(live: Live, shards: int, names: Sequence[str], change: Callable[[ReplayClient, str], str]) -> list[Outcome]:
    by_shard: dict[int, list[str]] = defaultdict(list)
    for name in names:
        by_shard[shard_of(name, shards)].append(name)
    found = []
    for shard, own in sorted(by_shard.items()):
        found += live.ask(shard, partial(_change, names=own, change=change))
    return found


def _change(client: ReplayClient, names: Sequence[str], change: Callable[[ReplayClient, str], str]) -> list[Outcome]:
    outcomes = []
    for name in names:
        try:
            outcomes.append(Outcome(name, change(client, name)))
        except RefusedError as error:
            outcomes.append(Outcome(name, str(error), refused=True))
    return outcomes
