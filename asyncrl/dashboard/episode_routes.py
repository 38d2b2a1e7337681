"""Answers requests for kept episodes and dead letters with plain values. Several threads may use it at once."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncrl.dashboard.episode_list import (
    NEWEST_FIRST,
    EpisodeGroup,
    EpisodeQuery,
    choices,
    group_page,
    groups_of,
    is_count,
    neighbours,
    page,
)
from asyncrl.dashboard.episode_page import describe_episode, more_tokens
from asyncrl.dashboard.episode_texts import EpisodeTexts
from asyncrl.dashboard.group_page import describe_group
from asyncrl.dashboard.runs import ShownRun
from asyncrl.dashboard.stores import ReplayStores, dead_letters, record_of
from asyncrl.dashboard.vocabulary import Vocabulary, load_vocabulary
from asyncrl.errors import RefusedError, StoreError
from asyncrl.observe.kept.episode import KeptRow
from asyncrl.runs.run import Run

RETRY_S = 30.0
LOOK_S = 0.4
"""The number of seconds for which one search request reads texts. The page sends further requests for the rest."""


class RunEpisodes:
    """The kept episodes of one run, with its tokenizer, which is loaded when the first episode is looked at."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept = run.kept()
        self.texts = EpisodeTexts(self.kept, self.vocabulary)
        self._run, self._clock = run, clock
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._loaded = 0.0
        self._counted: tuple[Sequence[KeptRow], dict[str, Any]] = ((), choices(()))
        self._selected: tuple[Sequence[KeptRow], EpisodeQuery | None, list[KeptRow]] = ((), None, [])
        self._grouped: tuple[Sequence[KeptRow], str, list[EpisodeGroup]] = ((), "", [])

    def vocabulary(self) -> Vocabulary:
        """The run's tokenizer. If it did not load, this tries again now and then, since a run exports its tokenizer at
        its end."""
        with self._lock:
            problem, now = self._vocabulary is not None and self._vocabulary.problem, self._clock()
            if self._vocabulary is None or (problem and now > self._loaded + RETRY_S):
                self._vocabulary, self._loaded = load_vocabulary(self._run), now
            return self._vocabulary

    def choices(self) -> dict[str, Any]:
        """The choices of the filters, counted again if there are new rows."""
        rows = self.kept.rows()
        with self._lock:
            if self._counted[0] is not rows:
                self._counted = (rows, choices(rows))
            return self._counted[1]

    def select(self, query: EpisodeQuery) -> list[KeptRow]:
        """All rows that a query selects. An open page repeats its query every few seconds, so the result is kept. A
        query with a text looks only in texts that `search` has read, and in ids."""
        rows, asked = self.kept.rows(), replace(query, offset=0, limit=0, grouped=False)
        with self._lock:
            if self._selected[0] is not rows or self._selected[1] != asked or query.text:
                self._selected = (rows, asked, asked.select(rows, self.texts.searched))
            return self._selected[2]

    def groups(self, query: EpisodeQuery) -> list[EpisodeGroup]:
        """The groups of the rows that a query selects."""
        found = self.select(query)
        with self._lock:
            if self._grouped[0] is not found or self._grouped[1] != query.sort:
                self._grouped = (found, query.sort, groups_of(found, self.kept.rows(), query))
            return self._grouped[2]

    def search(self, query: EpisodeQuery, seconds: float) -> dict[str, Any]:
        """Read texts for a query with a text. Without a text, the answer is empty. Otherwise it has a mapping `search`:
        `searched` is the number of episodes that are searched so far, `of` is the number of all episodes to search, and
        `complete` is true once the search has ended."""
        if not query.text:
            return {}
        wanted = replace(query, text="", sort=NEWEST_FIRST).select(self.kept.rows())
        complete = self.texts.read(wanted, seconds)
        searched = sum(self.texts.searched(row) is not None for row in wanted)
        return {"search": {"searched": searched, "of": len(wanted), "complete": complete}}


class EpisodeAnswers:
    """Answers requests about runs. `runs` maps the key of each run to the run."""

    def __init__(self, runs: Mapping[str, ShownRun], stores: ReplayStores) -> None:
        self._runs = {key: RunEpisodes(shown.run) for key, shown in runs.items()}
        self._stores = stores

    def by_address(self) -> dict[str, Callable[[ShownRun, web.Request], Any]]:
        """Map each address below a run's address to the function that answers it."""
        return {
            "episodes": self._list,
            "episodes/{step}/{id}": self._episode,
            "episodes/{step}/{id}/group": self._group,
            "episodes/{step}/{id}/tokens": self._tokens,
            "episodes/{step}/{id}/neighbours": self._neighbours,
            "dead-letters": self._dead_letters,
        }

    def _list(self, shown: ShownRun, request: web.Request) -> dict[str, Any]:
        episodes = self._runs[shown.key]
        query = EpisodeQuery.of(request.query)
        search = episodes.search(query, LOOK_S)
        found = (
            group_page(episodes.groups(query), query, episodes.texts.of)
            if query.grouped
            else page(episodes.select(query), query, episodes.texts.of)
        )
        problem = episodes.vocabulary().problem if found["rows"] else ""
        return {**found, **search, "choices": episodes.choices(), "vocabulary_problem": problem}

    def _episode(self, shown: ShownRun, request: web.Request) -> dict[str, Any]:
        episodes, (step, name) = self._runs[shown.key], _named(request)
        return {
            **describe_episode(episodes.kept.read(step, name), episodes.vocabulary()),
            "record": self._record(shown, name),
            "commands": _commands(shown.folder, name),
        }

    def _record(self, shown: ShownRun, name: str) -> dict[str, Any] | None:
        try:
            return self._stores.read(shown.run, lambda stored: record_of(stored, name))
        except StoreError:
            # Kept episodes outlive the store, which may be deleted or on another machine.
            return None

    def _group(self, shown: ShownRun, request: web.Request) -> dict[str, Any]:
        episodes, (step, name) = self._runs[shown.key], _named(request)
        group = episodes.kept.read(step, name).row.group_id
        return describe_group(episodes.kept.group(step, group), name, episodes.vocabulary())

    def _tokens(self, shown: ShownRun, request: web.Request) -> dict[str, Any]:
        episodes, (step, name) = self._runs[shown.key], _named(request)
        start = _number("start", request.query.get("start", ""))
        return more_tokens(episodes.kept.read(step, name), start, episodes.vocabulary())

    def _neighbours(self, shown: ShownRun, request: web.Request) -> dict[str, Any]:
        step, name = _named(request)
        return neighbours(self._runs[shown.key].select(EpisodeQuery.of(request.query)), step, name)

    def _dead_letters(self, shown: ShownRun, _: web.Request) -> dict[str, Any]:
        return self._stores.read(shown.run, dead_letters)


def _named(request: web.Request) -> tuple[int, str]:
    return _number("step", request.match_info["step"]), request.match_info["id"]


def _number(name: str, text: str) -> int:
    if not is_count(text):
        raise RefusedError(f"{name} must be a number, not {text!r:.40}")
    return int(text)


def _commands(folder: Path, name: str) -> dict[str, str]:
    """Commands that show more about an episode."""
    run, episode = shlex.quote(str(folder)), shlex.quote(name)
    return {
        "its time, span by span": f"asyncrl trace {run} --explain-episode {episode}",
        "the same episode in a terminal": f"asyncrl inspect show {run} {episode}",
    }
