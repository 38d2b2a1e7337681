import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ScoringError
from asyncrl.scoring.models.encoding import micro_batches, tokenize
from asyncrl.scoring.transcript import Segment


class Words:
    """A tokenizer that would merge "ab" into one token."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [1 if piece == "ab" else 2 for piece in text.replace("ab", "|ab|").split("|") if piece]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_micro_batches_hold_everything_once_within_the_bound(lengths, max_tokens):
    batches = list(micro_batches(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens


def test_no_token_spans_the_end_of_a_step():
    ids, ends = tokenize([Segment("a", True), Segment("b", True), Segment("ab", False), Segment("ab", True)], Words())
    assert ids == [2, 2, 1, 1]
    assert ends == [0, 1, 3]


def test_a_step_without_text_is_scored_where_it_stands():
    _, ends = tokenize([Segment("q", False), Segment("", True), Segment("a", True)], Words())
    assert ends == [0, 1]
    with pytest.raises(ScoringError, match="no text"):
        tokenize([Segment("", True)], Words())
