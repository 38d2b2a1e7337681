"""Runs next to each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.environment import ENVIRONMENT_FILE, record_environment
from asyncrl.runs.report.compare import as_plain, comparison_page, main
from asyncrl.runs.report.comparison import Comparison, compare, spread
from asyncrl.runs.report.reported import read_run
from tests.runs.report.test_command import Tags
from tests.runs.support import write_run


def compared(*runs: Path) -> Comparison:
    return compare([read_run(str(run)) for run in runs])


@pytest.mark.slow
def test_only_what_differs_is_shown_of_configuration_and_environment(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [0.1] * 4, {"learner.lr": 0.5})
    two = write_run(tmp_path / "two", [0.1] * 4, {"learner.lr": 0.25, "algorithm.advantage.name": "rloo"})
    record_environment(one)
    # Not recorded a second time: the working tree may change meanwhile.
    (two / ENVIRONMENT_FILE).write_bytes((one / ENVIRONMENT_FILE).read_bytes())
    found = compared(one, two)
    assert found.configuration == {"learner.lr": [0.5, 0.25], "algorithm.advantage.name": ["grpo", "rloo"]}
    assert found.environment == {}
    assert found.results["held-out accuracy, last"] == [0.75, 0.75]


@pytest.mark.slow
def test_the_waits_for_old_groups_are_compared_if_a_run_had_some(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", [0.1] * 4), write_run(tmp_path / "two", [0.1] * 4)
    waits = "seconds of waits for old groups"
    assert waits not in compared(one, two).results
    JsonLines(metrics_file(two, "replay")).log(4, {"learner_waited_for_old_groups_s": 12.0})
    found = compared(one, two).results
    assert found[waits] == [0.0, 12.0]
    assert "tokens masked as too old" not in found


@pytest.mark.slow
def test_a_run_that_recorded_no_environment_differs_in_none_of_it(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, [0.1]) for name in ("one", "two"))
    record_environment(one)
    assert compared(one, two).environment == {}


@pytest.mark.slow
def test_values_are_matched_where_runs_were_equally_far(tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", [0.0, 0.2, 0.4, 0.6])
    long = write_run(tmp_path / "long", [1.0] * 16)
    tables = {(table.measure, table.axis): table for table in compared(short, long).tables}
    rewards = tables["reward", "samples"]
    assert rewards.at == [8, 16, 24, 32]
    assert rewards.values == [pytest.approx([0.0, 0.2, 0.4, 0.6]), [1.0] * 4]
    assert tables["reward", "sampled tokens"].at == [80, 160, 240, 320]
    assert tables["reward", "seconds of training"].at == [2, 4, 6, 8]
    # The long run was evaluated before its first step and after its last.
    assert tables["held-out accuracy", "samples"].values == [[0.25, 0.25, 0.25, 0.75], [0.25] * 4]


@pytest.mark.slow
def test_sums_over_thinned_rows_count_the_steps_between(tmp_path: Path) -> None:
    whole, thinned = (write_run(tmp_path / name, [0.1] * 9) for name in ("whole", "thinned"))
    file = metrics_file(thinned, "learner")
    file.write_text("".join(line for at, line in enumerate(file.read_text().splitlines(True)) if at % 4 == 0))
    assert compared(whole, thinned).results["sampled tokens"] == [720, 720]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "statement"),
    [
        ([{}, {"run.seed": 1}], "2 runs of one configuration, which differ in their seeds (2 different ones)"),
        ([{}, {}], "differ in neither configuration nor seed"),
        ([{}, {"learner.lr": 0.5}], "no configuration is shown to be better"),
        ([{}, {"run.seed": 1}, {"learner.lr": 0.5}], "2 configurations (2, 1 runs each)"),
    ],
)
def test_it_says_what_the_number_of_runs_allows_to_conclude(
    tmp_path: Path, changes: list[dict[str, float]], statement: str
) -> None:
    runs = [write_run(tmp_path / f"run-{at}", [0.1], values) for at, values in enumerate(changes)]
    assert statement in compared(*runs).statement


@pytest.mark.slow
def test_several_runs_of_a_configuration_have_a_spread(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{seed}", [0.2 * seed], {"run.seed": seed}) for seed in range(3)]
    assert spread(compared(*runs), "reward, last") == [(0, 3, 0.0, pytest.approx(0.2), pytest.approx(0.4))]


@pytest.mark.slow
def test_runs_that_cannot_be_compared_are_refused_with_the_reason(tmp_path: Path) -> None:
    run, empty = write_run(tmp_path / "run", [0.1]), write_run(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="at least two"):
        compared(run)
    with pytest.raises(ConfigError, match="named twice"):
        compared(run, tmp_path / "." / "run")
    with pytest.raises(ConfigError, match="empty has no trained step"):
        compared(run, empty)
    with pytest.raises(ConfigError, match="is not a run"):
        compared(run, tmp_path / "missing")


@pytest.mark.slow
def test_it_prints_tables_or_json_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(tmp_path / at / "run", [0.1, 0.3], {"learner.lr": float(at)}) for at in ("1", "2"))
    page = tmp_path / "page.html"
    main([str(one), str(two), "--html", str(page)])
    printed = capsys.readouterr().out
    for text in ("learner.lr", "held-out accuracy, last", "reward at the same number of samples", "may be chance"):
        assert text in printed
    tags = Tags(page.read_text())
    assert "script" not in tags.tags
    assert tags.attributes == []
    for text in (str(one), str(two), "Reward by seconds of training", "Held-out accuracy by sampled tokens"):
        assert text in tags.text
    main([str(one), str(two), "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["configuration"] == {"learner.lr": [1.0, 2.0]}
    assert plain["curves"]["reward"]["samples"] == [[[8.0, 0.1], [16.0, 0.3]]] * 2


@pytest.mark.slow
def test_hostile_names_show_as_text(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, [0.1], {"model.path": name}) for name in ("<script>x", "b\x1b[31m"))
    found = compared(one, two)
    page = comparison_page(found)
    assert "script" not in Tags(page).tags
    assert "\x1b" not in page
    assert json.dumps(as_plain(found))
