"""Every metric that the sources write is in the registry, and docs/metrics.md is what the registry says. A whole run is
checked in tests/end_to_end/test_summary.py."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from asyncrl.agents.chat_api.server import ChatCounts
from asyncrl.observe.registry import BY_WRITER, describe
from asyncrl.observe.registry.page import SECTIONS, page
from asyncrl.replay.counters import COUNTERS, DEPTHS
from asyncrl.tools.interactions.users import InteractionCounts
from asyncrl.tools.toolbox import ToolCounts
from tests.observe.registry.unknown import unknown
from tests.observe.registry.written import logged, names_of, phases

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

PLACES = {
    ("learner", ""): (
        *("algorithms/metrics.py:summarise", "algorithms/metrics.py:_ages", "algorithms/metrics.py:_updates"),
        *("algorithms/metrics.py:_lags", "algorithms/metrics.py:episode_metrics", "algorithms/algorithm.py:summary"),
        *("algorithms/losses/implicit.py:implicit_summary", "learner/model/critic.py:critic_summary"),
        "learner/step_metrics.py:values",
    ),
    ("learner", "weights/"): ("weights/publisher.py:measured",),
    ("evaluation", "eval/"): ("replay/held_out/tally.py:means",),
    ("evaluation", "eval/SOURCE/"): ("replay/held_out/tally.py:means",),
    ("actor", ""): (
        *("engine/fleet/fleet.py:stats", "engine/fleet/pauses.py:counters"),
        *("agents/chat_api/agent.py:counters", "weights/canary.py:counters", "weights/receiver.py:counters"),
    ),
    ("scoring", ""): ("scoring/stats.py:report", "scoring/stats.py:_means"),
    ("replay", ""): (
        *("replay/service.py:report", "replay/service.py:failing"),
        *("replay/counters.py:status", "replay/counters.py:counters"),
    ),
}
"""The functions that name metrics, by who writes these, with what is put before their names."""

OF_ACTORS = ("engine", "tools", "episode", "agents", "actor")
"""The rooms whose metrics an actor writes."""


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
    assert list(SECTIONS) == list(BY_WRITER)


@pytest.mark.parametrize(("writer", "prefix"), PLACES)
def test_the_names_in_the_sources_are_known(writer: str, prefix: str) -> None:
    for place in PLACES[writer, prefix]:
        names = [f"{prefix}{name}" for name in names_of(place)]
        assert names
        assert unknown(writer, names) == [], f"{place} writes what asyncrl/observe/registry/{writer}.py does not have"


@pytest.mark.slow
def test_whatever_is_given_to_a_sink_has_known_names() -> None:
    rooms = {"learner": ["learner", "evaluation"], "scoring": ["scoring"], "replay": ["replay"]}
    rooms |= {room: ["actor"] for room in OF_ACTORS}
    found = {room: logged(room) for room in rooms}
    assert {"learner/reporting.py", "learner/step_metrics.py"} <= found["learner"].keys()
    assert {"actor/rollout_metrics.py"} <= found["actor"].keys()
    for room, writers in rooms.items():
        for path, names in found[room].items():
            lacking = set.intersection(*(set(unknown(writer, names)) for writer in writers))
            assert lacking == set(), f"{path} writes what asyncrl/observe/registry/ does not have"


@pytest.mark.slow
def test_each_measured_phase_has_a_row_of_its_own() -> None:
    learner = [f"seconds/{name}" for name in phases("learner", "phases")]
    actor = [f"{name}_s" for room in OF_ACTORS for name in phases(room, "timed")]
    assert {"seconds/wait", "seconds/train"} <= set(learner)
    assert {"generate_s", "tools_s"} <= set(actor)
    for writer, names in (("learner", learner), ("actor", actor)):
        found = [describe(writer, name) for name in names]
        assert [metric and metric.name for metric in found] == names


@pytest.mark.parametrize(
    ("writer", "names"),
    [
        ("replay", [*COUNTERS, *(f"depth_{name}" for name in DEPTHS), "filtered/zero_variance"]),
        ("actor", [f"tool_{each.name}" for each in fields(ToolCounts)]),
        ("actor", [f"chat_api_{each.name}" for each in fields(ChatCounts)]),
        ("actor", [f"interaction_{each.name}" for each in fields(InteractionCounts)]),
    ],
)
def test_every_counter_is_known(writer: str, names: list[str]) -> None:
    assert unknown(writer, names) == []
