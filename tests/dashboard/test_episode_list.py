from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from asyncrl.dashboard.episode_list import EpisodeQuery, choices, group_page, groups_of, neighbours, page
from asyncrl.dashboard.episode_texts import EpisodeText
from asyncrl.errors import RefusedError
from asyncrl.observe.kept.episode import KeptRow
from tests.observe.kept.examples import example_step

ROWS = [episode.row for step in range(4) for episode in example_step(step).episodes]


def texts(rows: Sequence[KeptRow]) -> list[EpisodeText]:
    return [EpisodeText(f"task of {row.group_id}", "truth", f"answer of {row.id}") for row in rows]


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


def test_masked_tokens_can_be_sorted_by_and_a_group_has_their_mean() -> None:
    rows = [structs.replace(row, masked=row.member) for row in ROWS]
    query = EpisodeQuery.of({"sort": "-masked", "masked": "2..", "rows": "groups"})
    found = query.select(rows)
    assert {row.member for row in found} == {2, 3}
    assert group_page(groups_of(found, rows, query), query, texts)["rows"][0]["masked"] == 2.5


def test_filters_hold_together() -> None:
    rows = selected(finish="truncated", tool="calculator", flag="random", source="examples", text="T00000000")
    assert rows
    assert all(row.finish == "truncated" and "random" in row.flags for row in rows)
    assert selected(tool="search") == []


def test_text_is_part_of_the_id_or_of_the_task() -> None:
    assert [row.id for row in selected(text="0002.1")] == ["t000000002.1.0"]
    assert {row.task_id for row in selected(text="train/2")} == {"examples/train/2"}


def test_text_is_part_of_the_text_of_an_episode_too() -> None:
    query = EpisodeQuery.of({"text": "Needle"})
    assert query.select(ROWS, lambda row: "a needle in hay" if row.member == 2 else None) == [
        row for row in query.select(ROWS, lambda row: "needle") if row.member == 2
    ]
    assert query.select(ROWS) == []


def test_a_page_of_groups_has_the_members_that_fit_and_their_means() -> None:
    query = EpisodeQuery.of({"rows": "groups", "sort": "-reward", "reward": "1..", "limit": "2", "offset": "1"})
    groups = groups_of(query.select(ROWS), ROWS, query)
    found = group_page(groups, query, texts)
    assert (found["matched"], found["groups"], found["offset"]) == (24, 12, 1)
    assert len(found["rows"]) == 2
    first = found["rows"][0]
    assert ([each["member"] for each in first["members"]], first["size"]) == ([1, 3], 4)
    assert first["reward"] == pytest.approx(1.02)
    assert first["lag"] == max(each["lag"] for each in first["members"])
    assert first["members"][1]["answer"] == f"answer of {first['group_id']}.3.0"
    assert first["members"][1]["task"] == f"task of {first['group_id']}"


def test_groups_are_sorted_by_what_they_show_and_groups_without_a_value_come_last() -> None:
    odd = [structs.replace(row, reward=float("nan") if row.member == 1 else row.reward) for row in ROWS[:4]]
    rows = [*odd, *ROWS[4:]]
    for sort in ("reward", "-reward", "-step", "id", "tokens", "-lag"):
        query = EpisodeQuery.of({"rows": "groups", "sort": sort})
        groups = groups_of(query.select(rows), rows, query)
        shown = [group.value(sort.removeprefix("-")) for group in groups]
        known = [value for value in shown if value == value]
        assert known == sorted(known, reverse=sort.startswith("-"))
        assert shown[: len(known)] == known
    assert len(groups) == 12


def test_rows_are_sorted_by_any_column_both_ways() -> None:
    assert [row.reward for row in selected(sort="-reward")] == sorted((row.reward for row in ROWS), reverse=True)
    assert [row.id for row in selected(sort="id")] == sorted(row.id for row in ROWS)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"colour": "red"}, "no filter colour"),
        ({"sort": "tools"}, "cannot be sorted by tools"),
        ({"reward": "much"}, "reward=much is not a range"),
        ({"reward": "nan"}, "reward=nan is not a range"),
        ({"rows": "tasks"}, "rows=tasks must be groups or episodes"),
        ({"limit": "-1"}, "limit=-1 must be a number"),
        ({"offset": "\N{SUPERSCRIPT TWO}"}, "must be a number"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused_with_what_is_wrong(query: dict[str, str], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        EpisodeQuery.of(query)


def test_a_page_is_a_part_of_the_rows_and_says_how_many_fit() -> None:
    query = EpisodeQuery.of({"offset": "3", "limit": "2", "step": "1.."})
    found = page(query.select(ROWS), query, texts)
    assert found["matched"] == 36
    assert [row["id"] for row in found["rows"]] == [row.id for row in query.select(ROWS)[3:5]]


def test_a_row_that_is_not_finite_can_still_be_sent() -> None:
    row = structs.replace(ROWS[0], reward=float("inf"))
    assert page([row], EpisodeQuery(), texts)["rows"][0]["reward"] == "inf"


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
