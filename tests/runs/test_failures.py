"""Failures of one cause are one group, however their numbers and values differ."""

from __future__ import annotations

from asyncrl.replay.store.records import DeadLetter
from asyncrl.runs.failures import group_failures
from asyncrl.runs.inspect.table import dead_letter_table
from asyncrl.text import kind_of


def letter(reason: str, order: int, scoring: bool = False) -> tuple[str, DeadLetter]:
    return f"t{order}", DeadLetter(reason, "g", 0, 0, 0, scoring, order)


def test_reasons_that_differ_only_in_values_and_numbers_are_one_kind_but_lines_of_code_differ():
    assert kind_of("KeyError: 'a' (my.py, line 3)") == kind_of("KeyError: 'b' (my.py, line 3)")
    assert kind_of("KeyError: 'a' (my.py, line 3)") != kind_of("KeyError: 'a' (my.py, line 30)")
    assert kind_of("it took more than 10 s") == kind_of("it took more than 20 s")


def test_the_most_frequent_group_is_first_and_shows_its_newest_reason_and_ids():
    letters = [letter("one", 1), letter("KeyError: 'a'", 2), letter("KeyError: 'b'", 3), letter("one", 4, scoring=True)]
    groups = group_failures(letters)
    assert [(each.reason, each.ids, each.scoring) for each in groups] == [
        ("KeyError: 'b'", ("t3", "t2"), False),
        ("one", ("t4",), True),
        ("one", ("t1",), False),
    ]


def test_a_table_has_at_most_the_groups_of_its_limit():
    letters = [letter(f"reason {'x' * order}", order) for order in range(5)]
    limited, whole = dead_letter_table(letters, 2), dead_letter_table(letters, 0)
    assert (limited.row_count, whole.row_count) == (2, 5)
    assert limited.title == "5 dead letters with 5 reasons, of which the 2 most frequent (--limit 0: all)"
