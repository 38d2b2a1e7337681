"""The heartbeats of all ranks tell which rank is stuck. The polls are counted here: no process runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.learner.ranks.activity import END, RankState, Stillness, StuckFinder

LIMIT_S = 10.0


def beat(rank: int = 0, advances: int = 1, phase: str = "train", **is_: bool) -> RankState:
    given = {"waits": False, "in_collective": False} | is_
    return RankState(rank, advances, phase, "somewhere", **given)


def after(*beats: RankState | None, polls: int = 1) -> RankState:
    """The state of a rank after these heartbeats, each followed by polls of a second without one."""
    stillness = Stillness(1.0)
    for each in beats:
        stillness.poll(each)
        for _ in range(polls - 1):
            stillness.poll(None)
    assert stillness.state is not None
    return stillness.state


def still(rank: int, seconds: float, **is_: bool) -> RankState:
    return msgspec.structs.replace(beat(rank, **is_), still_s=seconds)


def found(*polls: Sequence[RankState], seconds: float = 1.0) -> str | None:
    finder = StuckFinder(LIMIT_S, seconds)
    found = None
    for states in polls:
        found = finder.find(states)
    return found


def steadily(*states: RankState) -> str | None:
    """The result for ranks that have long run."""
    return found(states, seconds=LIMIT_S)


def test_a_rank_is_still_from_its_last_advance_and_never_while_it_waits_for_the_replay() -> None:
    assert after(beat(), beat(), polls=5).still_s == 9.0
    assert after(beat(), beat(advances=2), polls=5).still_s == 4.0
    assert after(beat(waits=True), beat(waits=True), polls=5).still_s == 4.0
    assert Stillness(1.0).state is None


def test_a_rank_that_has_waited_long_for_others_has_advanced_once_it_works_again() -> None:
    waited = [beat(in_collective=True)] * 20
    assert after(*waited).still_s == 19.0
    assert after(*waited, beat()).still_s == 0.0
    assert steadily(after(*waited, beat()), still(1, 0.0)) is None


def test_a_rank_whose_work_does_not_advance_is_named_with_the_others() -> None:
    said = steadily(still(0, 30.0, in_collective=True), still(1, 20.0))
    assert said is not None
    assert said.startswith("rank 1 works in phase train, at somewhere, and has not advanced for 20 s")
    assert said.endswith("; rank 0 waits for other ranks in phase train, at somewhere")
    assert steadily(still(0, 9.0), still(1, 9.0)) is None


def test_ranks_that_wait_for_one_which_waits_or_works_are_not_stuck() -> None:
    others = [still(rank, 100.0, in_collective=True) for rank in (0, 1)]
    assert steadily(*others, still(2, 100.0, waits=True)) is None
    assert steadily(*others, still(2, 9.0)) is None


def test_ranks_that_all_wait_for_each_other_are_stuck() -> None:
    said = steadily(still(0, 11.0, in_collective=True), still(1, 12.0, in_collective=True))
    assert said is not None
    assert said.startswith("rank 1 waits for other ranks")


def test_a_rank_that_waited_for_one_that_has_ended_has_the_whole_limit_from_that_end() -> None:
    left, ended = still(0, 100.0, in_collective=True), still(1, 0.0)
    assert found(*[[left, ended]] * 30, *[[left]] * 10) is None
    assert found(*[[left, ended]] * 30, *[[left]] * 11) is not None


def test_the_last_phase_has_a_limit_of_its_own() -> None:
    assert steadily(msgspec.structs.replace(beat(phase=END), still_s=59.0)) is None
    assert steadily(msgspec.structs.replace(beat(phase=END), still_s=61.0)) is not None


def test_no_rank_is_stuck_when_none_runs() -> None:
    assert found([], []) is None
