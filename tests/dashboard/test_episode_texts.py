"""The texts of kept episodes in the list and in its search."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncrl.dashboard.episode_texts import (
    EXCERPT,
    SEARCHED_TOKENS,
    UNREADABLE,
    EpisodeTexts,
    text_of,
)
from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.observe.kept.format import file_name
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import Role, Task
from tests.dashboard.test_episode_page import played
from tests.observe.kept.examples import example_episode, from_utf8, write_examples

BYTES = Vocabulary(from_utf8)
LONG_S = 1e9


def opened(folder: Path, **how: Any) -> tuple[KeptEpisodes, EpisodeTexts]:
    kept = KeptEpisodes(folder)
    return kept, EpisodeTexts(kept, how.pop("vocabulary", lambda: BYTES), **how)


def with_task(content: Any, truth: Any = "42") -> KeptEpisode:
    return replace(example_episode(0, 0, 0), task=Task("t/train/0", [{"role": "user", "content": content}], truth, "t"))


def test_task_truth_and_answer_are_in_the_list() -> None:
    text = text_of(example_episode(1, 0, 0), BYTES)
    assert text[:3] == ("What is 1 + 0?", "1", "The answer is 1. \N{GRINNING FACE}")
    assert "i use the tool: calculator(1 + 1)." in text.searched
    assert "what is 1 + 0?" in text.searched


def test_an_episode_without_a_task_shows_its_prompt() -> None:
    text = text_of(example_episode(1, 2, 0), BYTES)
    assert (text.task, text.truth) == ("user: What is 1 + 2?", "")


def test_special_tokens_are_left_out_of_excerpts_but_found() -> None:
    dot = Vocabulary(from_utf8, frozenset({ord("."), ord("!")}))
    text = text_of(example_episode(1, 0, 0), dot)
    assert text.answer == "The answer is 1 \N{GRINNING FACE}"
    assert "the answer is 1." in text.searched


def test_without_a_tokenizer_there_is_the_text_of_the_task() -> None:
    text = text_of(example_episode(1, 0, 0), Vocabulary(from_utf8, problem="no tokenizer"))
    assert (text.task, text.answer) == ("What is 1 + 0?", "")
    assert "what is" in text.searched


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "text", "text": "Look:"}, {"type": "image"}, "at this"], "Look: [image] at this"),
        ("a\n\n  b", "a b"),
        (None, ""),
        ({"odd": 1}, "{'odd': 1}"),
    ],
)
def test_any_content_of_a_message_becomes_one_line(content: Any, shown: str) -> None:
    assert text_of(with_task(content), BYTES).task == shown


def test_long_texts_are_cut_for_the_list_and_for_the_search() -> None:
    text = text_of(with_task("word " * 100_000, "7" * 100_000), BYTES)
    assert len(text.task) == EXCERPT + 1
    assert len(text.truth) < 100
    long = text_of(played([(Role.PROMPT, "ask"), (Role.ASSISTANT, "begin" + "x" * 100_000 + "end.")]), BYTES)
    assert len(long.answer) <= EXCERPT + 1
    assert long.answer.endswith("end.")
    assert "begin" in long.searched
    assert long.searched.endswith("end.")
    assert len(long.searched) < 2 * SEARCHED_TOKENS


def test_a_search_reads_for_a_limited_time_and_continues(tmp_path: Path) -> None:
    write_examples(tmp_path)
    kept, texts = opened(tmp_path, clock=count().__next__)
    rows = kept.rows()
    assert [texts.read(rows, 2.5) for _ in range(3)] == [False, True, True]
    assert all(texts.searched(row) for row in rows)


def test_a_text_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path)
    kept, texts = opened(tmp_path)
    first = texts.of(kept.rows()[:5])
    monkeypatch.setattr(KeptEpisodes, "several", lambda *_: pytest.fail("it is read again"))
    assert texts.of(kept.rows()[:5]) == first


def test_an_episode_that_was_trained_again_has_its_new_text(tmp_path: Path) -> None:
    write_examples(tmp_path, steps=1)
    kept, texts = opened(tmp_path)
    before = texts.of(kept.rows()[:1])[0].answer
    write_examples(tmp_path, steps=1, members=2, encode=lambda text: list(text.upper().encode()))
    assert texts.of(kept.rows()[:1])[0].answer == before.upper()


def test_deleted_and_damaged_steps_have_no_text(tmp_path: Path) -> None:
    write_examples(tmp_path)
    kept, texts = opened(tmp_path)
    rows = kept.rows()
    (tmp_path / "episodes" / file_name(0)).unlink()
    (tmp_path / "episodes" / file_name(1)).write_bytes(b"damaged")
    found = dict(zip(rows, texts.of(rows), strict=True))
    assert {text for row, text in found.items() if row.step < 2} == {UNREADABLE}
    assert all(text.answer for row, text in found.items() if row.step >= 2)
    assert texts.read(rows, LONG_S)


def test_texts_are_read_again_once_the_tokenizer_has_loaded(tmp_path: Path) -> None:
    write_examples(tmp_path, steps=1)
    found = [Vocabulary(from_utf8, problem="not yet")]
    kept, texts = opened(tmp_path, vocabulary=lambda: found[0])
    assert texts.of(kept.rows()[:1])[0].answer == ""
    found[0] = BYTES
    assert texts.of(kept.rows()[:1])[0].answer


def test_memory_for_texts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path)
    kept, texts = opened(tmp_path)
    monkeypatch.setattr("asyncrl.dashboard.episode_texts.MOST_CHARACTERS", 10)
    rows = sorted(kept.rows(), key=lambda row: -row.step)
    assert texts.read(rows, LONG_S)
    assert [texts.searched(row) is not None for row in rows] == [True] * 12 + [False] * 36
