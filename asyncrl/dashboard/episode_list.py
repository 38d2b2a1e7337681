"""Selects and orders kept episodes and their groups by a query, and cuts one page of a table from the result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from operator import attrgetter, itemgetter
from typing import Any, Self

from msgspec import structs

from asyncrl.dashboard.episode_texts import EpisodeText
from asyncrl.dashboard.plain import plain
from asyncrl.errors import RefusedError
from asyncrl.observe.kept.episode import KeptRow

NUMBERS = (
    *("step", "member", "reward", "outcome", "sampled", "masked", "tokens", "turns", "branches"),
    *("tool_calls", "lag", "version"),
)
TEXTS = ("source", "finish")
SETS = {"tool": "tools", "flag": "flags"}
SORTABLE = (*NUMBERS, *TEXTS, "id", "group_id", "task_id")
MEANS = ("reward", "outcome", "sampled", "masked", "tokens", "turns", "tool_calls", "member")
LARGEST = ("branches", "lag", "version", "step")
NEWEST_FIRST = "-step"
LARGEST_PAGE = 500
MOST_DIGITS = 18
TextsOf = Callable[[Sequence[KeptRow]], Sequence[EpisodeText]]
"""Gives the texts of episodes."""


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """A choice of episodes: those that meet all of its conditions.

    - `ranges`: maps the name of a number to its least and its largest allowed value;
    - `exact`: maps the name of a text to the value that it must have;
    - `members`: may name a tool that the episode must have called (`tools`), and a flag that it must have (`flags`);
    - `text`: a part of the episode's id, of its task's id, or of its text;
    - `sort`: a column of `SORTABLE`; with a minus before it, the largest values come first. NaN comes last;
    - `offset`, `limit`: the number of selected rows to skip, and the maximum number of rows of a page;
    - `grouped`: true if a row of the page is a group, false if it is an episode.
    """

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    sort: str = NEWEST_FIRST
    offset: int = 0
    limit: int = 100
    grouped: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """The query in an address: a range is `3`, `3..9`, `3..` or `..9`. Raises RefusedError: it names an unknown
        column, or a value is not a number."""
        known = {*NUMBERS, *TEXTS, *SETS, "text", "sort", "offset", "limit", "rows"}
        if unknown := query.keys() - known:
            raise RefusedError(f"there is no filter {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        given = {name: value for name, value in query.items() if value}
        sort = given.get("sort", NEWEST_FIRST)
        if sort.removeprefix("-") not in SORTABLE:
            raise RefusedError(f"episodes cannot be sorted by {sort}; sort by one of {', '.join(SORTABLE)}")
        return cls(
            {name: _range(name, given[name]) for name in NUMBERS if name in given},
            {name: given[name] for name in TEXTS if name in given},
            {SETS[name]: given[name] for name in SETS if name in given},
            given.get("text", ""),
            sort,
            _count("offset", given.get("offset", "0")),
            min(_count("limit", given.get("limit", "100")), LARGEST_PAGE),
            _is_grouped(given.get("rows", "episodes")),
        )

    def select(
        self, rows: Sequence[KeptRow], searched: Callable[[KeptRow], str | None] = lambda row: None
    ) -> list[KeptRow]:
        """Select the fitting rows, in order. Rows with equal values are ordered by group and member. `searched` gives
        the text of an episode in lower case; `None` if the text is not known yet."""
        found = list(filter(self._fits(searched), rows)) if self._restricts else list(rows)
        found.sort(key=attrgetter("group_id", "member"))
        name, descending = self.sort.removeprefix("-"), self.sort.startswith("-")
        value = attrgetter(name)
        # Only NaN differs from itself.
        with_value = [row for row in found if value(row) == value(row)]
        with_value.sort(key=value, reverse=descending)
        return with_value + [row for row in found if value(row) != value(row)]

    @property
    def _restricts(self) -> bool:
        return bool(self.ranges or self.exact or self.members or self.text)

    def _fits(self, searched: Callable[[KeptRow], str | None]) -> Callable[[KeptRow], bool]:
        ranges = [(attrgetter(name), *bounds) for name, bounds in self.ranges.items()]
        exact = [(attrgetter(name), value) for name, value in self.exact.items()]
        members = [(attrgetter(name), value) for name, value in self.members.items()]
        text = self.text.casefold()

        def fits(row: KeptRow) -> bool:
            for value, low, high in ranges:
                found = value(row)
                if not low <= found <= high:
                    return False
            return (
                all(value(row) == wanted for value, wanted in exact)
                and all(wanted in value(row) for value, wanted in members)
                and (text in row.id.casefold() or text in row.task_id.casefold() or text in (searched(row) or ""))
            )

        return fits


def _range(name: str, text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        start, end = float(low or -math.inf), float((high if dots else low) or math.inf)
    except ValueError:
        start = end = math.nan
    if math.isnan(start) or math.isnan(end):
        raise RefusedError(f"{name}={text} is not a range: write 3, 3..9, 3.. or ..9")
    return start, end


def _is_grouped(text: str) -> bool:
    if text not in ("groups", "episodes"):
        raise RefusedError(f"rows={text:.40} must be groups or episodes")
    return text == "groups"


def _count(name: str, text: str) -> int:
    if not is_count(text):
        raise RefusedError(f"{name}={text:.40} must be a number, 0 or more")
    return int(text)


def is_count(text: str) -> bool:
    """True if the text is a number that an address may have: 0 or more, with a bounded number of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def choices(rows: Iterable[KeptRow]) -> dict[str, Any]:
    """The choices of the filters: each value with the number of its episodes, and the range of the steps."""
    rows = list(rows)
    steps = [row.step for row in rows]
    return {
        "total": len(rows),
        "steps": [min(steps), max(steps)] if steps else None,
        "source": Counter(row.source for row in rows),
        "finish": Counter(row.finish for row in rows),
        "tool": Counter(tool for row in rows for tool in row.tools),
        "flag": Counter(flag for row in rows for flag in row.flags),
    }


def page(found: Sequence[KeptRow], query: EpisodeQuery, texts: TextsOf) -> dict[str, Any]:
    """One page of the rows that `query` selects, as plain values. `matched` counts all selected rows. `texts` gives the
    texts of rows."""
    shown = found[query.offset : query.offset + query.limit]
    return {"matched": len(found), "offset": query.offset, "rows": _with_texts(shown, texts)}


def _with_texts(rows: Sequence[KeptRow], texts: TextsOf) -> list[dict[str, Any]]:
    return [
        {**plain(structs.asdict(row)), "task": text.task, "truth": text.truth, "answer": text.answer}
        for row, text in zip(rows, texts(rows), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """The selected members of a group, which has `size` kept members."""

    rows: Sequence[KeptRow]
    size: int

    def value(self, name: str) -> Any:
        """The value of a column. In a column of MEANS, it is the mean of the members' values. In a column of LARGEST,
        it is the largest of them. In any other column all members have the same value."""
        values = [getattr(row, name) for row in self.rows]
        if name in MEANS:
            return fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)
        return max(values) if name in LARGEST else values[0]


def groups_of(found: Iterable[KeptRow], all_rows: Iterable[KeptRow], query: EpisodeQuery) -> list[EpisodeGroup]:
    """The groups of the selected episodes `found`, in the order of the query."""
    sizes = Counter((row.step, row.group_id) for row in all_rows)
    members: dict[tuple[int, str], list[KeptRow]] = {}
    for row in found:
        members.setdefault((row.step, row.group_id), []).append(row)
    groups = [EpisodeGroup(sorted(rows, key=attrgetter("member")), sizes[key]) for key, rows in sorted(members.items())]
    name, descending = query.sort.removeprefix("-"), query.sort.startswith("-")
    values = [(group.value(name), group) for group in groups]
    # Only NaN differs from itself.
    with_value = [each for each in values if each[0] == each[0]]
    with_value.sort(key=itemgetter(0), reverse=descending)
    return [group for _, group in with_value] + [group for value, group in values if value != value]


def group_page(
    groups: Sequence[EpisodeGroup],
    query: EpisodeQuery,
    texts: TextsOf,
) -> dict[str, Any]:
    """One page of groups, as plain values. `matched` counts all selected episodes, and `groups` their groups."""
    shown = groups[query.offset : query.offset + query.limit]
    members = iter(_with_texts([row for group in shown for row in group.rows], texts))
    rows = [
        {
            **plain({name: group.value(name) for name in (*MEANS, *LARGEST, "group_id", "task_id", "source")}),
            "size": group.size,
            "members": [next(members) for _ in group.rows],
        }
        for group in shown
    ]
    matched = sum(len(group.rows) for group in groups)
    return {"matched": matched, "groups": len(groups), "offset": query.offset, "rows": rows}


def neighbours(found: Sequence[KeptRow], step: int, name: str) -> dict[str, Any]:
    """The episodes before and after the episode `name` of `step` in the rows of a table (`None` at an end), and its own
    row number."""
    place = next((place for place, row in enumerate(found) if row.id == name and row.step == step), None)
    around = {"before": None, "after": None}
    if place is not None:
        around["before"] = plain(structs.asdict(found[place - 1])) if place else None
        around["after"] = plain(structs.asdict(found[place + 1])) if place + 1 < len(found) else None
    return {"matched": len(found), "place": place, **around}
