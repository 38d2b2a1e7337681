"""One episode as people see it: every token once, coloured by the mask, scores at the ends of their steps."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from rich.text import Text

from asyncrl.replay.store.records import DeadLetter
from asyncrl.replay.stored import StoredRun, StoredTrajectory
from asyncrl.runs.inspect import episode
from asyncrl.text import printable
from asyncrl.types import Reason, Role, Turn
from tests.helpers import make_trajectory
from tests.runs.inspect.support import make_run, printed, run_episodes

NAME = "t000000000.0.0"


@pytest.fixture
def record(tmp_path: Path) -> StoredTrajectory:
    core = make_run(tmp_path)
    run_episodes(core, 4)
    core.plan(0)
    core.store.close()
    with closing(StoredRun(tmp_path / "replay")) as stored:
        return stored.record(NAME)


def as_letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + each) for each in ids)


def shown(record: StoredTrajectory) -> str:
    return printed(episode.readable(record, as_letters))


def test_turns_have_heads_and_text_with_each_score_at_the_end_of_its_step(record: StoredTrajectory) -> None:
    lines = [line.rstrip(" ─") for line in shown(record).splitlines()]
    turns = lines[next(index for index, line in enumerate(lines) if line.startswith("turn 0")) :]
    assert turns == [
        "turn 0 · prompt · 3 tokens",
        "abc",
        "turn 1 · assistant · 4 tokens · 4 by version 0 · stop",
        "de ⟨0.9⟩ fg ⟨0.5⟩",
        "turn 2 · tool · 2 tokens",
        "hi",
        "turn 3 · assistant · 3 tokens · 3 by version 1 · stop",
        "jkl ⟨0.1⟩",
    ]


def test_the_first_turn_of_each_of_several_branches_says_so(record: StoredTrajectory) -> None:
    assert record.trajectory is not None
    first, call, _, answer = record.trajectory.turns
    turns = (first, call, Turn(7, 9, Role.PROMPT), answer)
    lines = shown(replace(record, trajectory=structs.replace(record.trajectory, turns=turns))).splitlines()
    heads = [line.partition(" tokens")[0] for line in lines if " · turn " in line or line.startswith("turn")]
    assert heads == [
        "branch 0 · turn 0 · prompt · 3",
        "turn 1 · assistant · 4",
        "branch 1 · turn 2 · prompt · 2",
        "turn 3 · assistant · 3",
    ]


def test_a_turn_under_a_grammar_says_so(record: StoredTrajectory) -> None:
    assert record.trajectory is not None
    *before, answer = record.trajectory.turns
    mass = np.array([1] * 9 + [0, 0.5, 0.25], np.float32)
    changes = {"turns": (*before, answer._replace(grammar="regex")), "grammar_mass": mass}
    under = replace(record, trajectory=structs.replace(record.trajectory, **changes))
    assert "3 by version 1 · stop · under a grammar (regex), mass 0.25" in shown(under)
    turns = episode.describe(under, as_letters)["trajectory"]["turns"]
    assert [turn.get("grammar_mass") for turn in turns] == [None, None, None, [0, 0.5, 0.25]]


def test_the_head_tells_state_labels_and_rewards(record: StoredTrajectory) -> None:
    head = shown(record)
    assert "planned, last planned for step 0" in head
    assert "12, of which 7 sampled, by version 0 or newer" in head
    for word in ("reward", "judged by rule+model", "process 0.5", "calculator 0.5", "generate 0.125"):
        assert word in head


def test_the_head_tells_what_a_scorer_says_and_runs_no_escape_sequence_of_it(record: StoredTrajectory) -> None:
    assert record.labels is not None
    said = replace(record.labels, reasons=(Reason("judge", "wrong: \x1b[31mred"),))
    head = shown(replace(record, labels=said))
    assert "judge says" in head
    assert "wrong: \N{REPLACEMENT CHARACTER}[31mred" in head


def test_colours_are_those_of_the_loss_mask(record: StoredTrajectory) -> None:
    assert record.trajectory is not None
    styles: Counter[str] = Counter()
    for part in episode.turns(record.trajectory, record.labels, as_letters):
        if isinstance(part, Text):
            for span in part.spans:
                if "⟨" not in part.plain[span.start : span.end]:
                    styles[str(span.style)] += span.end - span.start
    assert styles == {episode.SAMPLED: 7, episode.GIVEN: 5}


def test_plain_values_survive_json_and_hold_every_turn(record: StoredTrajectory) -> None:
    values = json.loads(json.dumps(episode.describe(record, as_letters)))
    trajectory = values["trajectory"]
    assert [turn["text"] for turn in trajectory["turns"]] == ["abc", "defg", "hi", "jkl"]
    assert trajectory["turns"][1]["tool_calls"][0]["arguments"] == {"expression": "1+2", "nested": {"deep": [1, None]}}
    assert [step["score"] for step in trajectory["steps"]] == pytest.approx([0.9, 0.5, 0.1])
    assert values["labels"]["outcome"] == 0.0
    assert values["facts"]["state"] == "planned"


def test_an_episode_without_labels_and_one_without_data_show_what_is_left(tmp_path: Path) -> None:
    core = make_run(tmp_path)
    ticket = core.tickets(1)[0]
    core.put(make_trajectory(ticket))
    core.store.close()
    with closing(StoredRun(tmp_path / "replay")) as stored:
        waiting = stored.record(ticket.id)
    assert "efgh" in shown(waiting)
    assert "removed; replay.retention=all" in shown(StoredTrajectory(waiting.id, waiting.facts, None, None, None))
    letter = DeadLetter("out of patience", "t000000000", 0, 1, 7, scoring=False)
    failed = shown(StoredTrajectory(NAME, None, None, None, letter))
    assert "attempt 2: out of patience" in failed
    assert "none, the episode failed" in failed


def test_escape_sequences_of_a_policy_do_nothing_to_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tü€") == "a�[2Jb\n\tü€"
