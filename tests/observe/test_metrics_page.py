"""Every metric has a row in docs/metrics.md. A whole run is checked in tests/end_to_end/test_summary.py."""

from __future__ import annotations

from dataclasses import fields

import pytest

from asyncrl.actor.chat_api.agent import ChatCounts
from asyncrl.actor.toolbox import ToolCounts
from asyncrl.replay.counters import COUNTERS, DEPTHS
from tests.observe.metrics_page import documented, undocumented


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("replay", [*COUNTERS, *(f"depth_{name}" for name in DEPTHS), "filtered/zero_variance"]),
        ("actor", [f"tool_{each.name}" for each in fields(ToolCounts)]),
        ("actor", [f"chat_api_{each.name}" for each in fields(ChatCounts)]),
    ],
)
def test_every_counter_is_on_the_page(kind: str, names: list[str]) -> None:
    assert undocumented(kind, names) == []


def test_names_with_a_variable_part_fit_and_others_do_not() -> None:
    assert undocumented("learner", ["lag/3", "masked/truncate", "loss", "time"]) == []
    assert undocumented("learner", ["losses", "lag", "eval/outcome"]) == ["losses", "lag", "eval/outcome"]


def test_every_name_is_explained_once() -> None:
    for names in documented().values():
        assert names
        assert len(names) == len(set(names))
