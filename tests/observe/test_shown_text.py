"""Images in the texts of episodes that people read."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.observe.shown_text import image_mark, shown_text
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.inspect.episode import describe, readable
from asyncrl.runs.inspect.episodes import prompt
from asyncrl.types import Role, Trajectory, Turn
from tests.helpers import make_trajectory

FIRST, SECOND = bytes(range(32)), bytes(range(32, 64))
PAD = ord("#")


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def episode() -> Trajectory:
    """A question with an image of three tokens, an answer, a result with an image of two, and an answer."""
    parts = [("ask###?", Role.PROMPT), ("ab", Role.ASSISTANT), ("##x", Role.TOOL), ("c", Role.ASSISTANT)]
    text = "".join(part for part, _ in parts)
    turns, position = [], 0
    for part, role in parts:
        turns.append(Turn(position, position + len(part), role))
        position += len(part)
    sampled = np.zeros(len(text), bool)
    for turn in turns[1::2]:
        sampled[turn.start : turn.end] = True
    return make_trajectory(
        tokens=np.array([ord(letter) for letter in text], np.int32),
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        turns=tuple(turns),
        steps=(),
        image_spans=np.array([[3, 6], [9, 11]], np.int32),
        image_digests=np.frombuffer(FIRST + SECOND, np.uint8).reshape(2, 32),
    )


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (0, 7, "ask[image 00010203, 3 tokens]?"),
        (9, 12, "[image 20212223, 2 tokens]x"),
        (0, 13, "ask[image 00010203, 3 tokens]?ab[image 20212223, 2 tokens]xc"),
        (4, 8, "?a"),
        (2, 5, "k[image 00010203, 3 tokens]"),
        (4, 5, ""),
        (7, 9, "ab"),
        (0, 0, ""),
    ],
)
def test_an_image_is_a_mark_where_it_begins(start: int, end: int, text: str):
    assert shown_text(episode(), start, end, decode) == text


def test_inspect_shows_marks_in_place_of_placeholders():
    trajectory = episode()
    record = StoredTrajectory(trajectory.id, None, trajectory, None, None)
    described = describe(record, decode)["trajectory"]["turns"]
    assert [turn["text"] for turn in described] == [
        f"ask{image_mark(FIRST, 3)}?",
        "ab",
        f"{image_mark(SECOND, 2)}x",
        "c",
    ]
    assert described[0]["tokens"] == [ord(letter) for letter in "ask###?"]
    assert prompt(trajectory, decode) == f"ask{image_mark(FIRST, 3)}?"
    assert readable(record, decode)
