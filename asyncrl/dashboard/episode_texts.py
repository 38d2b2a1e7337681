"""Reads the texts of kept episodes: excerpts of task and answer for the list, and the text in which a search looks.

Reading the texts of thousands of episodes takes seconds. So a search reads for a limited time at each request, and the
texts stay in memory.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.errors import AsyncrlError
from asyncrl.observe.kept.episode import KeptEpisode, KeptRow
from asyncrl.observe.shown_text import shown_text
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import Role, Task, Trajectory

EXCERPT = 320
"""The maximum number of characters of a task, and of an answer, in the list."""
TRUTH = 80
ANSWER_TOKENS = 240
PROMPT_TOKENS = 160
SEARCHED_TOKENS = 4096
"""The maximum number of tokens of an episode that a search covers. Half of them are the first tokens after the prompt,
and half are the last tokens."""
SEARCHED_TASK = 16_000
"""The maximum number of characters of a task that a search covers."""
MOST_CHARACTERS = 200_000_000
"""The maximum number of characters that the texts for searches may have in memory. Further episodes are not
searched."""


class EpisodeText(NamedTuple):
    """Excerpts of an episode's task, ground truth and answer, and its text for searches, in lower case."""

    task: str = ""
    truth: str = ""
    answer: str = ""
    searched: str = ""


UNREADABLE = EpisodeText()
"""The text of an episode whose file was deleted or is damaged. The page of the episode says why."""


class EpisodeTexts:
    """The texts of `kept` episodes, decoded with the run's vocabulary. Several threads may use this object."""

    def __init__(
        self, kept: KeptEpisodes, vocabulary: Callable[[], Vocabulary], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept, self._vocabulary, self._clock = kept, vocabulary, clock
        self._lock = threading.Lock()
        self._problem = ""
        self._characters = 0
        self._texts: dict[tuple[int, str], tuple[KeptRow, EpisodeText]] = {}

    def of(self, rows: Iterable[KeptRow]) -> list[EpisodeText]:
        """The texts of some rows."""
        rows = list(rows)
        with self._lock:
            self._forget_undecoded()
            self._read(row for row in rows if self._known(row) is None)
            return [self._known(row) or UNREADABLE for row in rows]

    def read(self, rows: Sequence[KeptRow], seconds: float) -> bool:
        """Read texts for about `seconds`. Return True if the texts of all rows are read, or memory has no room
        for more; False if the time was too short."""
        end = self._clock() + seconds
        with self._lock:
            self._forget_undecoded()
            if len(self._texts) > 2 * len(rows) + 1000:
                wanted = {(row.step, row.id) for row in rows}
                self._keep({key: found for key, found in self._texts.items() if key in wanted})
            missing = self._by_step(row for row in rows if self._known(row) is None)
            for step, of_step in missing.items():
                if self._characters >= MOST_CHARACTERS:
                    return True
                if self._clock() > end:
                    return False
                self._read_step(step, of_step)
        return True

    def searched(self, row: KeptRow) -> str | None:
        """The text of an episode for searches, in lower case; `None` if it is not read yet."""
        known = self._known(row)
        return None if known is None else known.searched

    def _known(self, row: KeptRow) -> EpisodeText | None:
        found = self._texts.get((row.step, row.id))
        # A step that was trained again has other episodes, and new rows.
        return found[1] if found is not None and found[0] is row else None

    def _read(self, rows: Iterable[KeptRow]) -> None:
        for step, of_step in self._by_step(rows).items():
            self._read_step(step, of_step)

    def _by_step(self, rows: Iterable[KeptRow]) -> Mapping[int, list[KeptRow]]:
        found: defaultdict[int, list[KeptRow]] = defaultdict(list)
        for row in rows:
            found[row.step].append(row)
        return found

    def _read_step(self, step: int, rows: Sequence[KeptRow]) -> None:
        vocabulary, texts = self._vocabulary(), dict.fromkeys((row.id for row in rows), UNREADABLE)
        try:
            episodes = self._kept.several(step, texts.keys())
        except (AsyncrlError, OSError):
            episodes = []
        texts |= {episode.row.id: text_of(episode, vocabulary) for episode in episodes}
        self._texts |= {(step, row.id): (row, texts[row.id]) for row in rows}
        self._characters += sum(len(text.searched) for text in texts.values())

    def _forget_undecoded(self) -> None:
        """Forget texts that were read without the vocabulary, once it has loaded."""
        problem = self._vocabulary().problem
        if problem != self._problem:
            self._keep({})
        self._problem = problem

    def _keep(self, texts: dict[tuple[int, str], tuple[KeptRow, EpisodeText]]) -> None:
        self._texts, self._characters = texts, sum(len(text.searched) for _, text in texts.values())


def text_of(episode: KeptEpisode, vocabulary: Vocabulary) -> EpisodeText:
    """The texts of an episode. Without a vocabulary there is only the text of its task."""
    trajectory, task = episode.trajectory, episode.task
    own = [turn for turn in trajectory.turns if turn.role is Role.ASSISTANT]
    played = answer = prompt = ""
    if not vocabulary.problem:

        def plain(ids: list[int]) -> str:
            return vocabulary.decode([each for each in ids if each not in vocabulary.special])

        if own:
            played = _both_ends(trajectory, own[0].start, vocabulary)
            answer = shown_text(trajectory, max(own[-1].start, own[-1].end - ANSWER_TOKENS), own[-1].end, plain)
        first = own[0].start if own else len(trajectory)
        prompt = "" if task else shown_text(trajectory, max(0, first - PROMPT_TOKENS), first, plain)
    messages = [] if task is None else [_message_text(each.get("content")) for each in task.messages]
    truth = "" if task is None else task.truth_text
    searched = "\n".join([*messages, truth])[:SEARCHED_TASK]
    return EpisodeText(
        _begin(_asked(task) if task else prompt, EXCERPT),
        _begin(truth, TRUTH),
        _end(answer, EXCERPT),
        f"{searched}\n{prompt}\n{played}".casefold(),
    )


def _both_ends(trajectory: Trajectory, start: int, vocabulary: Vocabulary) -> str:
    end, half = len(trajectory), SEARCHED_TOKENS // 2
    if end - start <= SEARCHED_TOKENS:
        return shown_text(trajectory, start, end, vocabulary.decode)
    parts = ((start, start + half), (end - half, end))
    return "\n".join(shown_text(trajectory, *part, vocabulary.decode) for part in parts)


def _asked(task: Task) -> str:
    """The last message of the user, or else the last message."""
    asked = [each for each in task.messages if each.get("role") == "user"] or list(task.messages)
    return _message_text(asked[-1].get("content")) if asked else ""


def _message_text(content: Any) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, list):
        parts = (part if isinstance(part, Mapping) else {"text": part} for part in content)
        return " ".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in parts)
    return "" if content is None else str(content)


def _begin(text: str, most: int) -> str:
    words = " ".join(text[: 4 * most].split())
    return words if len(words) <= most and len(text) <= 4 * most else f"{words[:most]}\N{HORIZONTAL ELLIPSIS}"


def _end(text: str, most: int) -> str:
    words = " ".join(text[-4 * most :].split())
    return words if len(words) <= most and len(text) <= 4 * most else f"\N{HORIZONTAL ELLIPSIS}{words[-most:]}"
