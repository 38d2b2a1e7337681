"""The feed: every task once an epoch, wherever one starts; weights, shards and the difficulty band."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import DataError
from asyncrl.replay.starts.feed import Band, Feed
from asyncrl.replay.store.store import Store
from asyncrl.types import Task
from tests.helpers import make_task


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, 1 << 24, durable=False)
    yield store
    store.close()


def tasks(count: int, source: str = "test", first: int = 0) -> list[Task]:
    return [
        Task(id=f"{source}{index}", messages=make_task(index).messages, ground_truth="", data_source=source)
        for index in range(first, first + count)
    ]


def draw(feed: Feed, store: Store, count: int) -> list[tuple[int, int]]:
    with store.transaction() as tx:
        return [feed.next(tx) for _ in range(count)]


def test_a_restarted_feed_goes_on_where_the_store_says(store: Store, tmp_path: Path) -> None:
    walked = draw(Feed(tasks(7), 3, True), store, 21)
    rows = [row for _, row in walked]
    assert all(sorted(rows[start : start + 7]) == list(range(7)) for start in (0, 7, 14))
    assert rows[:7] != rows[7:14]
    other = Store(tmp_path / "other", 1 << 24, durable=False)
    assert [each for _ in range(21) for each in draw(Feed(tasks(7), 3, True), other, 1)] == walked
    other.close()


def test_an_unshuffled_feed_keeps_the_files_order(store: Store) -> None:
    assert [row for _, row in draw(Feed(tasks(3), 0, False), store, 5)] == [0, 1, 2, 0, 1]


def test_weights_set_how_often_a_source_is_drawn_and_sources_without_one_never_are(store: Store) -> None:
    mixed = tasks(10, "a") + tasks(5, "b") + tasks(5, "c")
    feed = Feed(mixed, 0, True, {"a": 1.0, "b": 3.0})
    drawn = Counter(mixed[row].data_source for _, row in draw(feed, store, 2000))
    assert drawn["c"] == 0
    assert 0.7 < drawn["b"] / 2000 < 0.8
    assert sorted(Counter(row for _, row in draw(feed, store, 200) if row < 10).keys()) == list(range(10))


def test_a_weight_for_an_unknown_source_is_refused() -> None:
    with pytest.raises(DataError, match="names z"):
        Feed(tasks(3, "a"), 0, True, {"a": 1.0, "z": 1.0})


def test_shards_divide_the_rows_and_their_numbers_never_meet(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for shard in range(3):
        store = Store(tmp_path / str(shard), 1 << 24, durable=False)
        seen += draw(Feed(tasks(10), 0, True, shard=shard, shards=3), store, len(range(shard, 10, 3)))
        store.close()
    assert sorted(row for _, row in seen) == list(range(10))
    assert len({number for number, _ in seen}) == 10
    assert all(number % 3 == row % 3 for number, row in seen)


def test_tasks_outside_the_band_are_passed_over_counted_and_tried_again_later(store: Store) -> None:
    feed = Feed(tasks(4), 0, False, band=Band(0.2, 0.8, revisit=2))
    with store.transaction() as tx:
        for row, rate in enumerate((0.0, 0.5, 1.0, 0.5)):
            assert feed.next(tx)[1] == row
            feed.learned(tx, row, rate)
    assert [row for _, row in draw(feed, store, 2)] == [1, 3]
    with store.transaction() as tx:
        assert tx.counter("tasks_passed_over") == 2
    assert [row for _, row in draw(feed, store, 4)] == [0, 1, 2, 3]
    with store.transaction() as tx:
        for row in range(4):
            feed.learned(tx, row, 1.0)
            feed.learned(tx, row, 1.0)
    assert len(draw(feed, store, 10)) == 10, "a band in which no task lies does not stop the feed"


def test_the_last_row_of_an_epoch_belongs_to_this_epoch(store: Store) -> None:
    feed = Feed(tasks(2), 0, False, band=Band(0.2, 0.8, revisit=2))
    with store.transaction() as tx:
        assert [feed.next(tx)[1] for _ in range(2)] == [0, 1]
        feed.learned(tx, 1, 0.0)
    # Row 1 was seen in epoch 0. So it is passed over in epoch 1, and comes in epoch 2.
    assert [row for _, row in draw(feed, store, 3)] == [0, 0, 1]


def test_a_task_at_a_bound_of_the_band_is_within_it(store: Store) -> None:
    feed = Feed(tasks(3), 0, False, band=Band(0.25, 0.75, revisit=5))
    with store.transaction() as tx:
        for row, rate in enumerate((0.25, 0.75, 0.0)):
            assert feed.next(tx)[1] == row
            feed.learned(tx, row, rate)
    assert [row for _, row in draw(feed, store, 4)] == [0, 1, 0, 1]
