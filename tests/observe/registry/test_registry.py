from __future__ import annotations

import pytest

from asyncrl.observe.registry import BY_WRITER, EVERY_FILE, describe
from asyncrl.observe.registry.metric import Metric
from tests.observe.registry.unknown import unknown


def test_names_with_a_variable_part_fit_and_others_do_not() -> None:
    assert unknown("learner", ["lag/3", "masked/truncate", "loss", "time"]) == []
    assert unknown("learner", ["losses", "lag", "eval/outcome"]) == ["losses", "lag", "eval/outcome"]


@pytest.mark.parametrize(
    ("writer", "name", "found"),
    [
        ("learner", "masked/any", "masked/any"),
        ("learner", "masked/truncate", "masked/CORRECTION"),
        ("actor-0", "tools_s", "tools_s"),
        ("actor-0", "sandbox_s", "PHASE_s"),
        ("actor-host-7-4711", "agent/success", "agent/NAME"),
        ("scoring-0-shard-1", "rule/exact_match_mean", "rule/RULE_mean"),
        ("evaluation", "eval/openai/gsm8k/pass@4", "eval/SOURCE/pass@K"),
        ("replay-1", "step", "step"),
    ],
)
def test_the_metric_that_says_most_about_a_name_is_meant(writer: str, name: str, found: str) -> None:
    metric = describe(writer, name)
    assert metric is not None
    assert metric.name == found


def test_what_users_log_is_none_of_ours() -> None:
    assert describe("learner", "my_metric") is None
    assert describe("my-writer", "loss") is None


def test_kinds_say_what_may_be_summed_and_what_only_grows() -> None:
    kinds = {
        (writer, name): metric.kind
        for writer, name in [
            ("actor", "tokens"),
            ("learner", "tokens"),
            ("replay", "depth_ready"),
            ("replay", "failing"),
        ]
        if (metric := describe(writer, name)) is not None
    }
    assert list(kinds.values()) == ["counter", "gauge", "gauge", "text"]


@pytest.mark.parametrize("writer", BY_WRITER)
def test_every_metric_is_there_once_and_complete(writer: str) -> None:
    metrics: tuple[Metric, ...] = (*BY_WRITER[writer], *EVERY_FILE)
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    assert {metric.writer for metric in metrics} == {writer, "any"}
    for metric in metrics:
        assert metric.meaning
        assert "|" not in metric.meaning + metric.unit, "it would end a cell of the page"
        assert describe(writer, metric.name) == metric
