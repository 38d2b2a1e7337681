"""The report of a run is one page, for any run."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.locations import CONFIG_FILE
from asyncrl.errors import ConfigError
from asyncrl.machine.owner import OWNER_FILE
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.card import card, trained_model
from asyncrl.runs.environment import record_environment
from asyncrl.runs.report import episodes
from asyncrl.runs.report.compare import comparison_page
from asyncrl.runs.report.comparison import compare
from asyncrl.runs.report.page import write_report
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from asyncrl.runs.summary_text import write_summary
from tests.helpers import status_of
from tests.observe.kept.examples import from_utf8, write_examples
from tests.runs.support import learner_row, write_run

HOSTILE = "<script>alert(1)</script>\x1b[31m‮ </pre></style>"


class Tags(HTMLParser):
    """The tags and the text of a page. `attributes` are those that could load something or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value) for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(run: Path) -> Tags:
    page = write_report(str(run)).read_text()
    tags = Tags(page)
    assert "script" not in tags.tags
    assert all(name == "href" and (value or "").startswith("#") for name, value in tags.attributes)
    assert "http:" not in page
    return tags


@pytest.mark.slow
def test_the_page_of_a_finished_run_has_results_plots_configuration_and_versions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5, 0.9], {"learner.lr": 0.125, "learner.batch_size": 8})
    record_environment(run)
    write_summary(Run(run), 3, "done", "", "asyncrl resume run")
    page = page_of(run)
    for text in (
        "done after 3 of 3 steps",
        "held-out accuracy",
        "Reward of the training batches",
        "Seconds of a step",
        "Idle",
        "Episodes since the start",
        "learner.lr",
        "0.125",
        "torch 2",
        socket.gethostname(),
        "observe.keep_episodes",
    ):
        assert text in page.text
    assert "svg" in page.tags


@pytest.mark.slow
def test_hostile_text_shows_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", [0.1], {"model.path": HOSTILE, "run.name": HOSTILE})
    write_summary(Run(run), 1, "failed", HOSTILE, "asyncrl resume run")
    # Groups of four members, the last of which are hostile: the best of a step is member 3 of its last group.
    write_examples(run, steps=1)
    monkeypatch.setattr("asyncrl.runs.report.page.decoder", lambda run: from_utf8)
    page = page_of(run)
    assert "Step 0, reward 1.02" in " ".join(page.text.split())
    assert "<script>alert(1)</script>\\u001b[31m\\u202e" in page.text
    assert "\x1b" not in page.text
    assert "‮" not in page.text


def test_a_turn_of_megabytes_is_cut() -> None:
    text = episodes.cut("x" * 10_000_000)
    assert len(text) < 20_000
    assert "more characters" in text


@pytest.mark.slow
def test_a_run_of_an_earlier_version_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    written = yaml.safe_load((run / CONFIG_FILE).read_text())
    del written["observe"], written["learner"]["optimizer"]
    written["learner"]["a_key_of_then"] = 3
    (run / CONFIG_FILE).write_text(yaml.safe_dump(written))
    (run / "summary.json").write_text('{"run": "of then"}')
    page = page_of(run)
    assert "unfinished" in page.text
    assert "a_key_of_then: 3" in page.text
    assert "earlier version of asyncrl" in page.text


@pytest.mark.slow
def test_a_run_that_runs_has_a_page_of_now(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2], {"learner.steps": 10})
    with (run / OWNER_FILE).open("w") as lock:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, lock)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = page_of(run)
    assert "running after 2 of 10 steps" in page.text


@pytest.mark.slow
def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    metrics_file(run, "evaluation").unlink()
    assert "no step was trained" in page_of(run).text


@pytest.mark.slow
def test_a_run_of_many_steps_has_a_small_page_that_says_how_it_was_thinned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5])
    rows = (json.dumps({"step": step, "time": 100.0 + step, **learner_row(step, 0.5)}) for step in range(40_000))
    metrics_file(run, "learner").write_text("\n".join(rows) + "\n")
    write_summary(Run(run), 40_000, "done", "", "")
    page = write_report(str(run))
    assert page.stat().st_size < 1_000_000
    assert re.search(r"mean of \d+ rows", page.read_text())


ODD = ("NaN", "-Infinity", "1e308", "null", '"text"', "[1]", '"\\ud800"', "1" + "0" * 400, None)


@pytest.mark.slow
@pytest.mark.parametrize("value", ODD, ids=["nan", "inf", "1e308", "null", "text", "list", "half", "digits", "missing"])
def test_any_value_of_any_metric_leaves_report_comparison_card_and_summary(tmp_path: Path, value: str | None) -> None:
    """The last row has odd values at once, and each metric is odd in one row of its own; None leaves it out."""
    run, other = (write_run(tmp_path / name, [0.5] * 20) for name in ("run", "other"))
    for path in (run / "metrics").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        odd = [{**rows[0], name: ...} for name in rows[0]]
        odd.append({name: number if name in ("step", "time") else ... for name, number in rows[0].items()})
        path.write_text("".join(f"{as_line(row, value)}\n" for row in (*rows, *odd)))
    page_of(run)
    assert comparison_page(compare([read_run(str(run)), read_run(str(other))]))
    assert card(trained_model(Run(run)))
    assert write_summary(Run(run), 20, "stopped", "", "asyncrl resume run")


def as_line(row: dict[str, Any], value: str | None) -> str:
    written = {name: value if number is ... else json.dumps(number) for name, number in row.items()}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in written.items() if text is not None) + "}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "memory", "gpus", "packages"])
@pytest.mark.parametrize("value", [None, [None], {"a": 1}])
def test_a_damaged_record_of_the_hardware_counts_as_none(tmp_path: Path, name: str, value: object) -> None:
    run = write_run(tmp_path / "run", [0.5])
    record_environment(run)
    file = run / "environment.json"
    file.write_text(json.dumps({"starts": [{**json.loads(file.read_text())["starts"][0], name: value}]}))
    assert ("has no record" in page_of(run).text) == ((name, value) != ("packages", None))


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("report", tmp_path) == 2
    assert "is not a run" in capsys.readouterr().err
    (tmp_path / CONFIG_FILE).write_text("[: nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        write_report(str(tmp_path))


@pytest.mark.slow
def test_neither_report_nor_comparison_nor_card_tells_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [
        {
            "engine.server.environment": {"HF_TOKEN": f"s3cr3t-{number}"},
            "engine.server.arguments": ["--api-key", f"s3cr3t-{number}"],
            "data.train": [f"https://user:s3cr3t-{number}@host/tasks.jsonl"],
            "model.path": f"https://user:s3cr3t-{number}@host/model",
        }
        for number in range(2)
    ]
    runs = [write_run(tmp_path / f"run-{number}", [0.1, 0.9], each) for number, each in enumerate(values)]
    pages = [write_report(str(run)).read_text() for run in runs]
    assert "HF_TOKEN" in pages[0]
    out = tmp_path / "comparison.html"
    assert status_of("compare", *runs, "--html", out) == 0
    pages += [out.read_text(), capsys.readouterr().out, card(trained_model(Run(runs[0])))]
    assert not any("s3cr3t" in page for page in pages)
