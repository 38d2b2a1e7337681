"""The rows of a metrics file that figures get: all of a short file, a sample of a long one, and later only new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.dashboard import series
from asyncrl.dashboard.series import Wanted, catalogue, read_series
from asyncrl.observe.sinks import JsonLines, metrics_file, remove_steps
from asyncrl.runs.run import Run
from tests.dashboard.support import make_run, values


def test_a_long_file_is_sampled_and_says_of_how_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "one", 5000)
    monkeypatch.setattr(series, "READ_WHOLE", 10_000)
    found = read_series(Run(run), "learner", Wanted(["reward/mean"], points=100))
    assert not found["all"]
    assert 50 < len(found["step"]) <= 100
    assert (found["step"][0], found["step"][-1]) == (0, 4999)
    assert found["rows"] == pytest.approx(5000, rel=0.05)
    near = read_series(Run(run), "learner", Wanted(["reward/mean"], points=100, first=3000.0, last=3010.0))
    assert len(near["step"]) > 50
    assert near["step"][0] <= 2000 <= 2010 <= near["step"][-1] < 4999


def test_only_what_was_written_since_is_read_until_the_file_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 3)
    first = read_series(Run(run), "learner", Wanted(["reward/mean"]))
    assert (first["step"], first["reset"]) == ([0, 1, 2], True)
    again = read_series(Run(run), "learner", Wanted(["reward/mean"], after=first["cursor"]))
    assert (again["step"], again["reset"]) == ([], False)
    sink = JsonLines(metrics_file(run, "learner"))
    sink.log(3, {"reward/mean": 1.0})
    sink.close()
    more = read_series(Run(run), "learner", Wanted(["reward/mean"], after=first["cursor"]))
    assert (more["step"], more["columns"], more["reset"]) == ([3], {"reward/mean": [1.0]}, False)
    remove_steps(metrics_file(run, "learner"), lambda step: step > 0)
    resumed = read_series(Run(run), "learner", Wanted(["reward/mean"], after=more["cursor"]))
    assert (resumed["step"], resumed["reset"]) == ([0], True)


@pytest.mark.parametrize("after", ["0:" + "9" * 5000, "9" * 5000 + ":0", "0:" + "9" * 18, "0:\u0664", "x"])
def test_a_cursor_that_is_none_gives_the_whole(tmp_path: Path, after: str) -> None:
    found = values([make_run(tmp_path / "one", 3)], f"/api/runs/one/series?file=learner&after={after}")
    assert (found["step"], found["reset"]) == ([0, 1, 2], True)


def test_half_a_line_is_left_for_later_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 2)
    with metrics_file(run, "learner").open("a") as file:
        file.write('{"step": 2, \n[1]\n{"step": 3, "time": 9.0}\n{"step": 4, "ti')
    assert read_series(Run(run), "learner", Wanted([]))["step"] == [0, 1, 3]


def test_what_is_no_finite_number_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 2, odd=float("nan"), text="some", large=float("inf"))
    found = values([run], "/api/runs/one/series?file=learner&name=odd&name=text&name=large&name=missing")
    assert set(map(tuple, found["columns"].values())) == {(None, None)}


def test_a_name_with_a_star_stands_for_all_that_begin_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 2, **{"lag/0": 1.0, "lag/10": 2.0, "lagging": 3.0})
    assert set(read_series(Run(run), "learner", Wanted(["lag/*"]))["columns"]) == {"lag/0", "lag/10"}


def test_the_catalogue_has_meanings_of_our_metrics_and_the_beginning_of_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 2, mine=2.0, text="x" * 10_000)
    found = catalogue(Run(run))["learner"]
    assert found["reward/mean"]["meaning"] == "mean reward of the trained trajectories"
    assert found["mine"] == {"newest": 2.0}
    assert len(found["text"]["newest"]) == series.LONGEST_TEXT
