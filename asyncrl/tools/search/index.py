"""Full-text search (BM25, by bm25s) in a user's corpus, which each host indexes once.

- An index is a folder of the cache, named after the digest of the corpus' bytes: a changed corpus gets a new index.
- If a process needs an index that is missing, it locks the index's name, and writes a folder with a hidden name. The
  folder is renamed when it is complete. Other processes wait for the lock. If the process is killed meanwhile, the next
  one starts over.
- An index is memory-mapped, so all processes of a host share its pages. Only the vocabulary is loaded by each process.

The score is Lucene's variant of BM25 with k1 = 1.5 and b = 0.75. Passages with equal scores keep their order in the
corpus. Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009); Lu, BM25S (2024).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import json
import logging
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.data.converters.rows import published_rows, text_of
from asyncrl.errors import ConfigError, DataError
from asyncrl.machine.files import sync, write_whole
from asyncrl.machine.long_work import long_work, unmeasured_work
from asyncrl.tools.search.passages import TitledPassage, passage_of

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("facts.jsonl")
"""A small corpus for examples: one fact in each passage."""

DEFAULT_PLACE = "~/.cache/asyncrl/search"
FORM = 2
"""The version of the index format. Change it whenever the form of the files changes, or when a query finds other
passages than before."""

ROWS_AT_ONCE = 1 << 14
JOINERS = "\u200c\u200d"
"""Invisible characters that only say how the letters of a word are drawn."""
_PASSAGES = "passages.arrow"
_COLUMNS = pa.schema([("title", pa.large_string()), ("text", pa.large_string())])


def words(text: str) -> list[str]:
    """The words of a text in the form of the index: in lower case, without accents."""
    if not text.isascii():
        kept = (each for each in unicodedata.normalize("NFKD", text) if not unicodedata.combining(each))
        text = "".join(each for each in kept if each not in JOINERS)
    return _word().findall(text.casefold())


@cache
def _word() -> re.Pattern[str]:
    """The pattern of a word: letters and digits, with the marks after them. In Indic scripts, vowels are marks."""
    marks = (each for each in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(each) in ("Mn", "Mc"))
    # A variation selector after a digit belongs to an emoji.
    written = "".join(each for each in marks if "VARIATION SELECTOR" not in unicodedata.name(each, ""))
    # The lookahead spares ASCII characters the search in hundreds of ranges.
    return re.compile(rf"\w+(?:(?=[^\x00-\x7f])[{written}]+\w*)*")


class CorpusIndex:
    """The index of a corpus, a file of JSON lines or Parquet. `place` is the folder of indexes."""

    def __init__(self, corpus: str | None, place: str | None = None) -> None:
        self._corpus = Path(corpus).expanduser() if corpus is not None else SHIPPED
        self._place = Path(place or DEFAULT_PLACE).expanduser()

    def prepare(self) -> None:
        """Build the index, unless this host has it already.

        Raises ConfigError: the corpus cannot be read or has no words, or the index cannot be written.
        """
        if importlib.util.find_spec("bm25s") is None:
            raise ConfigError("actor.tools: search needs the extra: pip install 'asyncrl[search]'")
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            folder = self._folder
            if not folder.exists():
                with _locked(folder.with_name(f"{folder.name}.lock"), self._corpus):
                    if not folder.exists():
                        _build(self._corpus, folder)
        except (OSError, DataError) as error:
            raise ConfigError(f"actor.search.corpus: {self._corpus} cannot be indexed: {error}") from error

    async def find(self, query: str, topk: int) -> Sequence[TitledPassage]:
        """Find passages, see `PassageSource`."""
        return await asyncio.to_thread(self.search, query, topk)

    def search(self, query: str, topk: int) -> list[TitledPassage]:
        """Find at most `topk` passages that have a word of the query, the best first."""
        bm25, passages = self._opened
        ids = bm25.get_tokens_ids(words(query))
        if not ids:
            return []
        rows = best(bm25.get_scores_from_ids(ids), topk)
        return [TitledPassage(*(passages[name][int(row)].as_py() for name in _COLUMNS.names)) for row in rows]

    @cached_property
    def _folder(self) -> Path:
        return self._place / f"{self._corpus.stem}-{FORM}-{_digest(self._corpus, self._place)}"

    @cached_property
    def _opened(self) -> tuple[Any, pa.Table]:
        from bm25s import BM25

        bm25 = BM25.load(self._folder, mmap=True, show_progress=False)
        return bm25, pa.ipc.open_file(pa.memory_map(str(self._folder / _PASSAGES))).read_all()


def best(scores: np.ndarray, topk: int) -> np.ndarray:
    """The indices of the highest scores, best first: at most `topk`, and only scores above 0. Equal scores keep their
    order.

    `scores` is float32[D], for D passages.
    """
    count = min(topk, int(np.count_nonzero(scores > 0)))
    if not count:
        return np.empty(0, np.intp)
    lowest = np.partition(scores, -count)[-count]
    found = np.flatnonzero(scores >= lowest)
    return found[np.argsort(-scores[found], kind="stable")][:count]


def _digest(corpus: Path, place: Path) -> str:
    """The digest of a corpus' bytes. It is computed again only if the file's size or modification time differs."""
    path = str(corpus.resolve())
    known = place / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    with _locked(known.with_suffix(".lock"), corpus):
        about = corpus.stat()
        now = {"path": path, "bytes": about.st_size, "changed": about.st_mtime_ns}
        try:
            noted = json.loads(known.read_text())
            if noted.items() >= now.items():
                return str(noted["digest"])
        except (OSError, ValueError, KeyError, AttributeError):
            logger.debug("no digest of %s is known", corpus)
        with corpus.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
        write_whole(known, json.dumps({**now, "digest": digest}))
        return digest


@contextmanager
def _locked(path: Path, corpus: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process indexes %s: waiting for it", corpus)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(corpus: Path, folder: Path) -> None:
    """Build an index. Raises DataError: the corpus cannot be read or has no words; OSError: a file cannot be read or
    written."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    vocabulary: dict[str, int] = {}
    ids = _write_passages(corpus, partial / _PASSAGES, vocabulary)
    if not vocabulary:
        raise DataError("it has no words")
    with unmeasured_work(f"indexing {len(ids):,} passages of {corpus.name}"):
        from bm25s import BM25

        bm25 = BM25()
        bm25.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        bm25.save(partial, show_progress=False)
    for file in partial.iterdir():
        sync(file)
    partial.rename(folder)
    sync(folder.parent)


def _write_passages(corpus: Path, path: Path, vocabulary: dict[str, int]) -> list[list[int]]:
    """Write the passages, and add their new words to `vocabulary`. Returns the word numbers of each passage."""
    from bm25s.stopwords import STOPWORDS_EN

    stop, ids, rows = frozenset(STOPWORDS_EN), list[list[int]](), _passages(corpus)
    with long_work(f"reading {corpus.name}", 0, "passages") as advance, pa.ipc.new_file(path, _COLUMNS) as writer:
        while part := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_batch(pa.RecordBatch.from_arrays(list(map(list, zip(*part, strict=True))), schema=_COLUMNS))
            for title, text in part:
                kept = (word for word in words(f"{title} {text}") if word not in stop)
                ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in kept])
            advance(len(part))
    return ids


def _passages(corpus: Path) -> Iterator[TitledPassage]:
    """Yield the passages of a corpus. Raises DataError: a passage has no text."""
    for place, row in published_rows(str(corpus)):
        text = text_of(row.get("text"))
        contents = row.get("contents")
        passage = (
            TitledPassage(text_of(row.get("title")), text)
            if text
            else passage_of(contents if isinstance(contents, str) else text_of(contents))
        )
        if not passage.text:
            raise DataError(f"{place} has no text: a passage has `title` and `text`, or `contents` with both")
        yield passage
