"""The results of an evaluation, by data source and in all, no matter which shard a task is on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asyncrl.replay.held_out.tally import Tally, evaluation_values, joined, tallies
from asyncrl.replay.store.records import TrajectoryRecord


def attempt(
    source: str, outcome: float, vote: str = "", process: float | None = None, sampled: int = 4
) -> TrajectoryRecord:
    return TrajectoryRecord(
        *("g", 0, 9, sampled, 0), outcome=outcome, reward=2 * outcome, data_source=source, vote=vote, process=process
    )


ATTEMPTS = [
    (0, attempt("easy", 1.0, "7", 0.5)),
    (0, attempt("easy", 1.0, "7", 1.0)),
    (0, attempt("easy", 0.0, "8")),
    (1, attempt("easy", 0.0, "3", sampled=10)),
    (1, attempt("easy", 1.0, "4")),
    (2, attempt("hard", 0.5)),
]
COUNTS = {"count": 6, "failed": 3}


def test_every_number_of_a_result_is_told_for_all_tasks_and_for_each_source() -> None:
    values = evaluation_values({**COUNTS, "sources": tallies(ATTEMPTS, 3)})
    assert values.items() >= {"count": 6.0, "failed": 3.0, "accuracy": 0.5, "outcome": 3.5 / 6, "reward": 7 / 6}.items()
    assert (values["length"], values["process"]) == (5.0, 0.75)
    assert (values["easy/accuracy"], values["easy/count"], values["hard/outcome"]) == (0.6, 5.0, 0.5)
    # Two of the first task's three attempts are right, and one of the second's two; no attempt at the third has a vote.
    assert values["pass@2"] == pytest.approx((1 + 1) / 2)
    assert values["easy/maj@2"] == pytest.approx(((1 + 0.5 + 0.5) / 3 + 0.5) / 2)
    assert (values["maj@3"], values["best@3"]) == (1.0, 1.0)
    assert not values.keys() & {"pass@1", "hard/pass@2", "hard/maj@2", "hard/process"}


def test_shards_add_up_to_the_whole() -> None:
    parts = [tallies([(row, each) for row, each in ATTEMPTS if row % 2 == shard], 3) for shard in range(2)]
    whole, together = (evaluation_values({**COUNTS, "sources": each}) for each in (tallies(ATTEMPTS, 3), joined(parts)))
    assert together == pytest.approx(whole)


def task(*attempts: tuple[float, str]) -> Sequence[TrajectoryRecord]:
    return [attempt("easy", outcome, vote) for outcome, vote in attempts]


def test_a_task_without_an_answer_counts_in_the_majority() -> None:
    estimates = Tally.of([task((1, "4"), (1, "4")), task((0, ""), (0, ""))], 2).estimates
    assert [estimates[name] for name in ("maj@1", "maj@2", "best@2")] == [0.5, 0.5, 0.5]
    assert Tally.of([task((0, ""), (0, ""))], 2).estimates.keys() == {"pass@1", "pass@2", "best@1", "best@2"}


def test_the_majority_is_never_better_than_the_best() -> None:
    drawn = random.Random(1)
    for _ in range(50):
        tasks = [
            task(*((drawn.random(), drawn.choice(["", "1", "2"])) for _ in range(drawn.choice([2, 4]))))
            for _ in range(drawn.randint(1, 6))
        ]
        estimates = Tally.of(tasks, 4).estimates
        for k in (1, 2, 4):
            assert estimates.get(f"maj@{k}", 0.0) <= estimates.get(f"best@{k}", 0.0) + 1e-9


def test_a_silent_task_on_another_shard_counts_and_a_silent_source_does_not() -> None:
    attempts = [
        *((0, attempt("easy", 1.0, "4")) for _ in range(2)),
        *((1, attempt("easy", 0.0)) for _ in range(2)),
        *((2, attempt("hard", 0.25)) for _ in range(2)),
    ]
    parts = [tallies([(row, each) for row, each in attempts if row % 2 == shard], 2) for shard in range(2)]
    for sources in (tallies(attempts, 2), joined(parts), joined(parts[::-1])):
        values = evaluation_values({"sources": sources})
        assert (values["maj@2"], values["easy/maj@2"]) == (0.5, 0.5)
        assert values["best@2"] == pytest.approx((1 + 0 + 0.25) / 3)
        assert "hard/maj@2" not in values


def test_a_single_source_is_not_told_twice_and_nothing_scored_is_no_number() -> None:
    values = evaluation_values({"sources": tallies([ATTEMPTS[5]], 1)})
    assert values == {"outcome": 0.5, "accuracy": 0.0, "reward": 1.0, "length": 4.0}
    assert evaluation_values({"outcome": float("nan"), "sources": {}}).keys() == {"outcome"}


def test_process_scores_of_several_shards_are_one_mean() -> None:
    parts = [tallies([(0, attempt("easy", 1.0, process=0.5))], 1), tallies([(1, attempt("easy", 1.0, process=1.0))], 1)]
    assert evaluation_values({"sources": joined(parts)})["process"] == 0.75
