"""A store goes on only with the tasks that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import StoreError
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.feed import Feed
from tests.helpers import make_task
from tests.replay.support import Core, make_settings


def having(place: str, first: int, count: int) -> ReplaySettings:
    """Settings with the same tasks in another order."""
    tasks = [make_task(row) for row in reversed(range(first, first + count))]
    return make_settings(**{place: Feed(tasks, seed=0, shuffle=True) if place == "feed" else tasks})


@pytest.mark.parametrize(
    ("place", "first", "count", "file"), [("feed", 0, 5, "data.train"), ("held_out", 100, 3, "data.eval")]
)
def test_a_run_does_not_go_on_with_as_many_tasks_in_another_order(
    tmp_path: Path, place: str, first: int, count: int, file: str
) -> None:
    """Stored groups name rows. Files of a folder that were renamed give these rows other tasks."""
    core = Core(tmp_path, make_settings())
    assert core.tickets(1)
    core.store.close()
    with pytest.raises(StoreError, match=f"{file} has the same number of tasks, but.*; restore the data files"):
        Core(tmp_path, having(place, first, count))


def test_while_nothing_was_run_the_tasks_may_be_mended(tmp_path: Path) -> None:
    Core(tmp_path, make_settings()).store.close()
    core = Core(tmp_path, having("feed", 0, 5))
    assert core.tickets(1)
    core.restart()
    core.store.close()


def test_two_tasks_that_change_places_are_found_out_whichever_they_are(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    assert core.tickets(1)
    core.store.close()
    tasks = [make_task(row) for row in (1, 0, 2, 3, 4)]
    with pytest.raises(StoreError, match=r"data\.train has the same number of tasks, but"):
        Core(tmp_path, make_settings(feed=Feed(tasks, seed=0, shuffle=True)))
