"""The rows of a study become cells, a table, and a section of the page."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from benchmarks.studies.figures import collapsed
from benchmarks.studies.report import FIGURES, failures, overview, table, write_page, write_section
from benchmarks.studies.summary import Spread, cell_of
from tests.benchmarks.studies.support import STUDIES, STUDY, row

LEVELS = {"size": "small", "colour": "red"}
FAST = [
    row(0, 0.2, samples=0, seconds=0.0),
    row(1, 0.9, samples=8, seconds=3.0, lag_mean=1.0, lag_max=2, ess=0.5, k3=0.002),
    row(2, 0.7, samples=16, seconds=6.0, lag_mean=2.0, lag_max=1, ess=0.8, k3=0.004, evicted=16, entropy=0.1, idle=0.5),
]
SLOW = [
    row(1, 0.4, samples=8, seconds=5.0),
    row(2, 0.8, samples=16, seconds=9.0, evicted=0, lag_mean=4.0, lag_max=5, ess=0.9, entropy=0.3, idle=0.7),
]
COLLAPSED = [row(1, 0.7, samples=8), row(2, 0.1, samples=16, evicted=0)]
FAILED = [row(None, status="failed", reason="out of\nmemory")]


def test_a_cell_has_medians_with_the_least_and_the_greatest_and_counts_every_run() -> None:
    cell = cell_of(LEVELS, 1e-4, [FAST, SLOW, COLLAPSED, FAILED], target=0.8)
    assert (cell.seeds, cell.failed, cell.collapsed) == (4, 1, 1)
    assert cell.samples_to_target == Spread(inf, 8, inf, 4)
    assert cell.seconds_to_target == Spread(inf, 3, inf, 4)
    assert cell.best == Spread(0.8, 0.7, 0.9, 3)
    assert cell.last == Spread(0.7, 0.1, 0.8, 3)
    assert cell.lag_mean == Spread(2.75, 1.5, 4.0, 2)
    assert cell.lag_max == Spread(3.5, 2, 5, 2)
    assert cell.ess == Spread(0.7, 0.5, 0.9, 2)
    assert cell.k3 == Spread(0.003, 0.003, 0.003, 1)
    assert cell.evicted_share == Spread(0, 0, 0.5, 3)


def test_a_gain_is_taken_seed_by_seed_where_both_runs_have_an_accuracy_and_began_with_the_same_policy() -> None:
    ours = [
        *([row(0, 0.4, seed=0), row(1, 0.8, seed=0)], [row(0, 0.3, seed=1), row(1, 0.51, seed=1)]),
        *([row(0, 0.9, seed=2)], [row(0, 0.42, seed=3)]),
    ]
    theirs = [
        *([row(0, 0.3, seed=1), row(1, 0.11, seed=1)], [row(0, 0.4, seed=0)], [row(0, 0.9, seed=2, status="failed")]),
        [row(0, 0.4, seed=3)],
    ]
    gain = cell_of(LEVELS, 1e-4, ours, 0.8, theirs).gain
    assert gain is not None
    assert (gain.count, round(gain.least, 9), round(gain.greatest, 9)) == (2, 0.2, 0.2)
    assert cell_of(LEVELS, 1e-4, ours, 0.8).gain is None


def test_a_gain_of_fewer_seeds_than_the_cell_has_says_so() -> None:
    ours = [[row(0, 0.4, seed=0), row(1, 0.6, seed=0)], [row(0, 0.3, seed=1)], [row(0, 0.9, seed=2)]]
    theirs = [[row(0, 0.4, seed=0)], [row(0, 0.3, seed=1, status="failed")]]
    assert FIGURES["gain"](cell_of(LEVELS, 1e-4, ours, 0.8, theirs)) == "+0.10; 1 of 3 seeds"
    assert FIGURES["gain"](cell_of(LEVELS, 1e-4, ours[:1], 0.8, theirs)) == "+0.10"
    assert FIGURES["gain"](cell_of(LEVELS, 1e-4, ours, 0.8)) == ""


def test_the_seconds_of_all_steps_are_those_of_runs_that_made_all() -> None:
    failed = [row(1, 0.4, samples=8, seconds=1.0, status="failed")]
    assert cell_of(LEVELS, 1e-4, [FAST, failed], target=0.8).step_seconds == Spread(6, 6, 6, 1)
    assert cell_of(LEVELS, 1e-4, [failed], target=0.8).step_seconds is None


def test_a_failed_run_that_was_evaluated_before_has_no_best_and_no_last_accuracy() -> None:
    failed = [row(1, 0.4, samples=0, seconds=1.0, evicted=9, status="failed")]
    cell = cell_of(LEVELS, 1e-4, [FAST, failed], target=0.8)
    assert (cell.best, cell.last) == (Spread(0.9, 0.9, 0.9, 1), Spread(0.7, 0.7, 0.7, 1))
    assert cell.evicted_share == Spread(0.5, 0.5, 0.5, 1), "its samples are of an earlier moment than its evictions"
    assert (cell.seeds, cell.failed) == (2, 1)


def test_a_mismatch_of_exactly_0_was_not_measured() -> None:
    assert cell_of(LEVELS, 1e-4, [[row(1, 0.4, k3=0.0)]], target=0.8).k3 is None


def test_a_reason_with_the_end_of_a_log_is_told_by_its_first_and_its_last_line() -> None:
    reason = "actor-0 ended 21 times, at last with status 1:\nloading\nloading\nasyncrl: no room"
    cells = [cell_of(LEVELS, 1e-4, [[row(None, status="failed", reason=reason)]], target=0.8)]
    assert failures(cells) == "* small, red: actor-0 ended 21 times, at last with status 1: asyncrl: no room"


def test_nothing_is_said_of_what_nobody_knows() -> None:
    cell = cell_of(LEVELS, 1e-4, [FAILED], target=0.8)
    assert (cell.best, cell.evicted_share) == (None, None)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        *(([0.2, 0.8, 0.4], True), ([0.2, 0.8, 0.5], False), ([0.7, 0.1], True), ([0.05, 0.0], False)),
        *(([0.0, None], False), ([], False)),
    ],
)
def test_a_run_has_collapsed_if_it_ends_at_half_of_its_best_and_well_below(
    accuracies: list[float | None], expected: bool
) -> None:
    assert collapsed(accuracies) is expected


def test_the_table_shows_spread_and_who_did_not_reach_the_target() -> None:
    cells = [
        cell_of(LEVELS, 1e-4, [FAST, SLOW, FAILED], target=0.8),
        cell_of({"size": "large", "colour": "red"}, 3e-5, [SLOW], target=0.9),
    ]
    head, _, first, second = table(STUDY, cells).splitlines()
    assert head.startswith("| size | colour | lr | seeds | failed | collapsed | samples to target |")
    assert first == (
        "| small | red | 0.0001 | 3 | 1 | 0 | 16 (8 to never) | 9 (3 to never) "
        "| 8 (6 to 9) "
        "| 0.85 (0.80 to 0.90) | 0.75 (0.70 to 0.80) | 2.8 (1.5 to 4.0) | 4 (2 to 5) | 0.200 (0.100 to 0.300) "
        "| 0.70 (0.50 to 0.90) | 3.0e-03 | 25% (0% to 50%) | 60% (50% to 70%) |"
    )
    assert second.startswith("| large | red | 3e-05 | 1 | 0 | 0 | never | never | 9 | 0.80 | 0.80 | 4.0 | 5 |")
    assert failures(cells) == "* small, red: out of memory"


def test_the_table_leaves_out_figures_that_no_cell_has_and_shows_what_guards_saw() -> None:
    watched = [
        row(0, 0.2, reward=0.1, agreement=0.9, hack_alarms=0),
        row(1, 0.1, reward=0.4, agreement=0.5, hack_alarms=1, samples=8, evicted=0),
    ]
    head = table(STUDY, [cell_of(LEVELS, 1e-4, [watched], 0.8), cell_of(LEVELS, 1e-4, [SLOW], 0.8)]).splitlines()[0]
    assert "ess, least" in head
    assert "hack alarms" in head
    head, _, only = table(STUDY, [cell_of(LEVELS, 1e-4, [watched], 0.8)]).splitlines()
    assert "ess, least" not in head
    assert head.endswith("| reward, change | agreement, change | hack alarms |")
    assert only.endswith("| +0.30 | -0.40 | 1 |")


def test_a_section_is_written_between_its_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    other = "<!-- study other -->\nkept\n<!-- end -->\n"
    page.write_text(f"# Page\n{other}<!-- study toy -->\nold\n<!-- end -->\nbehind\n")
    write_section(page, STUDY, "new\n")
    assert page.read_text() == f"# Page\n{other}<!-- study toy -->\nnew\n<!-- end -->\nbehind\n"
    for unfit in (other, f"<!-- study toy -->\n{other}"):
        page.write_text(unfit)
        with pytest.raises(ValueError, match="has no place for the study toy"):
            write_section(page, STUDY, "new")
        assert page.read_text() == unfit


def test_the_overview_has_a_column_for_each_level_of_the_first_factor_and_says_what_came_of_the_runs() -> None:
    small = {"size": "small", "colour": "red"}
    cells = [
        cell_of(small, 1e-4, [FAST, COLLAPSED, FAILED], target=0.8),
        cell_of({**small, "colour": "blue"}, 3e-5, [FAST, FAST], 0.8, [[row(0, 0.2), row(1, 0.8)]]),
        cell_of({**small, "size": "large"}, 1e-4, [SLOW, SLOW, SLOW], target=0.8),
    ]
    best, gain, samples = overview(STUDY, cells).split("\n\n**")
    assert best.splitlines() == [
        "**Best accuracy**, by `size`:",
        "",
        "| colour | lr | small | large |",
        "| --- | --- | --- | --- |",
        "| red | 0.0001 | 0.80 (0.70 to 0.90); 1 failed; 1 collapsed | 0.80 |",
        "| blue | 3e-05 | 0.90; 2 of 3 seeds |  |",
    ]
    assert gain.splitlines()[4:] == ["| red | 0.0001 |  |  |", "| blue | 3e-05 | +0.10 |  |"]
    assert samples.splitlines() == [
        "Samples to target**, by `size`:",
        "",
        "| colour | lr | small | large |",
        "| --- | --- | --- | --- |",
        "| red | 0.0001 | never (8 to never) | 16 |",
        "| blue | 3e-05 | 8 |  |",
    ]


def test_every_study_shows_figures_that_there_are() -> None:
    assert all(set(study.shown) <= FIGURES.keys() for study in STUDIES)


@pytest.mark.slow
def test_a_page_gets_the_overview_and_its_folder_the_picture_and_all_figures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- study toy -->\nold\n<!-- end -->\n")
    runs = [FAST, SLOW, FAILED]
    cells = [cell_of(LEVELS, 1e-4, runs, target=0.8)]
    write_page(page, STUDY, "where and when", cells, {("small", "red"): runs})
    assert page.read_text() == (
        "# Page\n<!-- study toy -->\nwhere and when\n\n![accuracy over samples](studies/toy.png)\n\n"
        "Thick lines are means of the seeds that did not fail, thin lines single seeds.\n\n"
        f"{overview(STUDY, cells)}\n\n"
        "All figures of each combination are in [studies/toy.md](studies/toy.md).\n\n"
        "* small, red: out of memory\n<!-- end -->\n"
    )
    assert (tmp_path / "studies" / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "studies" / "toy.md").read_text() == (
        "# All figures of the study `toy`\nWhich colour is best at which size? [page.md](../page.md) says more.\n\n"
        f"where and when\n\n{table(STUDY, cells)}\n"
    )
