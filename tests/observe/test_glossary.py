"""Every metric has an entry in the glossary. A whole run is checked in tests/end_to_end/test_summary.py."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from asyncrl.actor.chat_api.agent import ChatCounts
from asyncrl.actor.toolbox import ToolCounts
from asyncrl.observe.glossary import FILES, page, unknown
from asyncrl.replay.counters import COUNTERS, DEPTHS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("replay", [*COUNTERS, *(f"depth_{name}" for name in DEPTHS), "filtered/zero_variance"]),
        ("actor", [f"tool_{each.name}" for each in fields(ToolCounts)]),
        ("actor", [f"chat_api_{each.name}" for each in fields(ChatCounts)]),
    ],
)
def test_every_counter_is_in_the_glossary(kind: str, names: list[str]) -> None:
    assert unknown(kind, names) == []


def test_names_with_a_variable_part_fit_and_others_do_not() -> None:
    assert unknown("learner", ["lag/3", "masked/truncate", "loss", "time"]) == []
    assert unknown("learner", ["losses", "lag", "eval/outcome"]) == ["losses", "lag", "eval/outcome"]


@pytest.mark.parametrize("kind", FILES)
def test_every_name_is_explained_once(kind: str) -> None:
    names = [name for metric in FILES[kind].metrics for name in metric.names.split(", ")]
    assert len(names) == len(set(names))
    assert all(metric.meaning for metric in FILES[kind].metrics)
