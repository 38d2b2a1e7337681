"""Episodes of evaluations in a scorer's log."""

from __future__ import annotations

import logging

import pytest
from msgspec import structs

from asyncrl.ids import evaluation_group, feed_group, ticket_id
from asyncrl.scoring.samples import MAX_CHARS, EvaluationSamples
from asyncrl.types import Labels
from tests.scoring.fakes import CharTokenizer, answered

LABELS = Labels("episode", 0.5, 1.0, "exact_number", extra={"rule/exact_number": 1.0, "process": 0.25}, vote="72")


def shown(samples: EvaluationSamples, group: str, source: str = "test", text: str = "#### 72") -> None:
    task, trajectory = answered(text, source=source)
    samples.show(task, structs.replace(trajectory, id=ticket_id(group, 0, 0)), LABELS)


def test_the_first_episodes_of_each_evaluation_and_source_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    samples = EvaluationSamples(1, CharTokenizer())
    for version, row, source in ((1, 0, "a"), (1, 1, "a"), (1, 2, "b"), (2, 0, "a")):
        shown(samples, evaluation_group(version, row), source)
    shown(samples, feed_group(7), "c")
    logged = [record.getMessage().splitlines()[0].split()[1:4] for record in caplog.records]
    assert logged == [["e1-000000.0.0", "of", "a,"], ["e1-000002.0.0", "of", "b,"], ["e2-000000.0.0", "of", "a,"]]


def test_a_sample_has_the_texts_and_all_scores_of_its_episode(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown(EvaluationSamples(1, CharTokenizer()), evaluation_group(0, 0), text="#### 72" + "!" * 2 * MAX_CHARS)
    text = caplog.records[0].getMessage()
    assert "[prompt] what?\n[response] callok#### 72!!" in text
    assert "characters cut]" in text
    assert "[ground_truth] 72\n[vote] 72\n" in text
    assert text.endswith("[score] rule/exact_number 1, process 0.25, outcome 1, reward 0.5")


def test_nothing_is_logged_if_no_samples_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown(EvaluationSamples(0, CharTokenizer()), evaluation_group(0, 0))
    assert caplog.records == []
