from __future__ import annotations

import pytest
from msgspec import structs

from asyncrl.dashboard.episode_list import EpisodeQuery, choices, neighbours, page
from asyncrl.errors import RefusedError
from asyncrl.observe.kept.episode import KeptRow
from tests.observe.kept.examples import example_step

ROWS = [episode.row for step in range(4) for episode in example_step(step).episodes]


def selected(**query: str) -> list[KeptRow]:
    return EpisodeQuery.of(query).select(ROWS)


def test_without_a_filter_all_come_the_newest_step_first_and_groups_together() -> None:
    rows = selected()
    assert [row.step for row in rows] == sorted((row.step for row in ROWS), reverse=True)
    assert [(row.group_id, row.member) for row in rows[:4]] == [(rows[0].group_id, member) for member in range(4)]


@pytest.mark.parametrize(
    ("name", "value", "low", "high"),
    [("step", "2", 2, 2), ("step", "1..2", 1, 2), ("reward", "0.5..", 0.5, 9), ("lag", "..1", 0, 1)],
)
def test_a_range_has_both_of_its_ends(name: str, value: str, low: float, high: float) -> None:
    expected = {row.id for row in ROWS if low <= getattr(row, name) <= high}
    assert {row.id for row in selected(**{name: value})} == expected
    assert expected


def test_filters_hold_together() -> None:
    rows = selected(finish="truncated", tool="calculator", flag="random", source="examples", text="T00000000")
    assert rows
    assert all(row.finish == "truncated" and "random" in row.flags for row in rows)
    assert selected(tool="search") == []


def test_text_is_part_of_the_id_or_of_the_task() -> None:
    assert [row.id for row in selected(text="0002.1")] == ["t000000002.1.0"]
    assert {row.task_id for row in selected(text="train/2")} == {"examples/train/2"}


def test_rows_are_sorted_by_any_column_both_ways() -> None:
    assert [row.reward for row in selected(sort="-reward")] == sorted((row.reward for row in ROWS), reverse=True)
    assert [row.id for row in selected(sort="id")] == sorted(row.id for row in ROWS)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"colour": "red"}, "no filter colour"),
        ({"sort": "tools"}, "not sorted by tools"),
        ({"reward": "much"}, "reward=much is no range"),
        ({"reward": "nan"}, "reward=nan is no range"),
        ({"limit": "-1"}, "limit=-1 must be a number"),
        ({"offset": "\N{SUPERSCRIPT TWO}"}, "must be a number"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused_with_what_is_wrong(query: dict[str, str], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        EpisodeQuery.of(query)


def test_a_page_is_a_part_of_the_rows_and_says_how_many_fit() -> None:
    query = EpisodeQuery.of({"offset": "3", "limit": "2", "step": "1.."})
    found = page(query.select(ROWS), query)
    assert found["matched"] == 36
    assert [row["id"] for row in found["rows"]] == [row.id for row in query.select(ROWS)[3:5]]


def test_a_row_that_is_not_finite_can_still_be_sent() -> None:
    row = structs.replace(ROWS[0], reward=float("inf"))
    assert page([row], EpisodeQuery())["rows"][0]["reward"] == "inf"


def test_choices_count_episodes_by_value() -> None:
    found = choices(ROWS)
    assert found["total"] == len(ROWS)
    assert found["steps"] == [0, 3]
    assert found["finish"] == {"completed": 36, "truncated": 12}
    assert found["tool"] == {"calculator": len(ROWS)}
    assert choices([])["steps"] is None


def test_the_neighbours_of_an_episode_are_those_of_the_filtered_table() -> None:
    rows = selected(finish="truncated")
    found = neighbours(rows, rows[1].step, rows[1].id)
    assert (found["place"], found["matched"]) == (1, len(rows))
    assert (found["before"]["id"], found["after"]["id"]) == (rows[0].id, rows[2].id)
    first = neighbours(rows, rows[0].step, rows[0].id)
    assert first["before"] is None
    outside = neighbours(selected(finish="completed"), rows[0].step, rows[0].id)
    assert (outside["place"], outside["before"], outside["after"]) == (None, None, None)
