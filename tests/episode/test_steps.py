"""Step spans in policy tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.chat.chat import Chat
from asyncrl.episode.steps import Split, find_split, split_steps
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.types import Role, Turn
from tests.episode.fakes import END, ids, make_tokenizer

TOKENIZER = make_tokenizer()
CHAT = Chat(TOKENIZER)


def texts(split: Split, *turns: str, stop: bool = True) -> list[str]:
    """The texts of the steps of a conversation in which a tool answers between the turns."""
    spans, pieces, position = [], [], 0
    for turn in turns:
        for text, role in ((turn + END * stop, Role.ASSISTANT), ("\n\nresult\n\n", Role.TOOL)):
            pieces.append(ids(TOKENIZER, text))
            finish = "stop" if role is Role.ASSISTANT and stop else ""
            spans.append(Turn(position, position + len(pieces[-1]), role, finish))
            position += len(pieces[-1])
    tokens = np.concatenate(pieces)
    return [CHAT.text(tokens[step.start : step.end]) for step in split_steps(split, tokens, spans, CHAT.piece)]


TEXT = "One\nmore.\n\nTwo.\n \n\nThree"


@pytest.mark.parametrize(
    ("split", "turns", "steps"),
    [
        ("turn", [TEXT, "Four"], [TEXT + END, "Four" + END]),
        ("paragraph", [TEXT, "Four"], ["One\nmore.\n\n", "Two.\n \n\n", "Three" + END, "Four" + END]),
        ("line", [TEXT, "Four"], ["One\n", "more.\n\n", "Two.\n \n\n", "Three" + END, "Four" + END]),
        # Newlines at the start or end of a turn make no step of their own.
        ("paragraph", ["\n\n\nOne\n\n\n"], ["\n\n\nOne\n\n\n" + END]),
        ("line", ["\n"], ["\n" + END]),
        # Characters of several tokens stay whole.
        ("paragraph", ["解\n\n是 👩‍👩‍👧\n\n。"], ["解\n\n", "是 👩‍👩‍👧\n\n", "。" + END]),
    ],
)
def test_steps_are_turns_paragraphs_or_lines_of_what_the_policy_wrote(split: str, turns: list[str], steps: list[str]):
    assert texts(split, *turns) == steps


def test_the_last_token_of_a_cut_turn_may_begin_a_step():
    assert texts("line", "a\nb", stop=False) == ["a\n", "b"]


def sentences(pieces: Sequence[str]) -> list[int]:
    return [index + 1 for index, piece in enumerate(pieces[:-1]) if piece.endswith(".")]


def test_a_function_of_ones_own_names_the_tokens_with_which_steps_begin():
    split = find_split("tests.episode.test_steps.sentences")
    assert texts(split, "One. Two.\nThree.", "Four") == ["One.", " Two.", "\nThree." + END, "Four" + END]
    assert texts(lambda pieces: [0], "One. Two.", "") == ["One. Two." + END, END]


@pytest.mark.parametrize("begins", [[2, 1], [1, 1], [-1], [99], ["a"], None])
def test_a_function_that_gives_no_such_tokens_fails_the_episode(begins: object):
    with pytest.raises(InvariantError, match=r"the function of actor\.step_split"):
        texts(lambda pieces: begins, "One. Two.")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("word", "use turn, paragraph, line, or the dotted path"),
        ("no.such", "cannot be imported"),
        ("tests.episode.test_steps.END", "is not a function"),
    ],
)
def test_a_split_that_cannot_be_used_is_refused_with_the_fix(name: str, fix: str):
    with pytest.raises(ConfigError, match=f"step_split={name}.*{fix}"):
        find_split(name)


@pytest.mark.slow
@given(st.lists(st.text(st.sampled_from("ab \n\t解é"), min_size=1), min_size=1, max_size=3), st.booleans())
def test_steps_cover_each_turn_and_lose_nothing(turns: list[str], stop: bool):
    whole = texts("turn", *turns, stop=stop)
    for split in ("paragraph", "line"):
        assert "".join(texts(split, *turns, stop=stop)) == "".join(whole)


@pytest.mark.slow
@given(st.lists(st.text(st.sampled_from("ab 解é"), min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_each_paragraph_is_one_step(paragraphs: list[str]):
    assert len(texts("paragraph", "\n\n".join(paragraphs))) == len(paragraphs)
