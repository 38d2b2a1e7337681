"""The chain of waits, situation by situation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.machine.doing import Doing
from asyncrl.runs.state.situation import RoleNow, ShardNow, Situation
from asyncrl.runs.state.stalls import chain, faults, sentence

WORKS: Mapping[str, RoleNow] = {
    name: RoleNow(name, silent_s=0.4, does=Doing(phase, 0.0), does_s=31.0)
    for name, phase in {
        "replay": "serve",
        "scoring-0": "score",
        "scoring-1": "score",
        "actor-0": "play",
        "actor-1": "play",
        "learner": "wait",
    }.items()
}
NO_ROOM = "the store runs/a/replay cannot commit: there is no room on its disk"
FULL = ShardNow("replay", 8, committed=24, capacity=24)


def role(name: str, **changes: Any) -> RoleNow:
    given: dict[str, Any] = {"silent_s": 0.4, "does": Doing("play", 0.0), "does_s": 31.0, **changes}
    return RoleNow(name, **given)


def situation(*roles: RoleNow, shards: list[ShardNow] | None = None, **changes: Any) -> Situation:
    shard = ShardNow("replay", 8, ready=8)
    return Situation(shards or [shard], {**WORKS, **{each.name: each for each in roles}}, **{"step": 12, **changes})


LEARNS = role("learner", does=Doing("train", 0.0))
MEASURES = role("learner", does=Doing("evaluate", 0.0))
SCORES = ShardNow("replay", 8, ready=5, scoring=3, playing=1, waiting=9, scorers={"scoring-0": 5})
PLAYS = ShardNow("replay", 8, ready=6, scoring=1, playing=4, actors={"actor-0": 9, "actor-1": 3})
WAITS = "learner waits for the batch of step 12 for 31 s: "

OLD_GROUPS = "waits for the 3 oldest groups, begun at version 12, for 4 s of at most 60 s"

CASES = [
    # Old groups.
    (
        situation(shards=[replace(PLAYS, ready=9, old_groups=OLD_GROUPS)]),
        f"{WAITS}{OLD_GROUPS}: actor-0 and 1 more play 12 episodes",
    ),
    (
        situation(
            shards=[replace(PLAYS, ready=9, playing=0, actors={}, scorers={"scoring-0": 5}, old_groups=OLD_GROUPS)]
        ),
        f"{WAITS}{OLD_GROUPS}: scoring-0 scores 5 trajectories",
    ),
    # No role waits for long.
    (situation(LEARNS, shards=[ShardNow("replay", 8, playing=3, actors={"actor-0": 9})]), ""),
    (situation(), "learner waits for the batch of step 12 for 31 s"),
    # The learner itself.
    (situation(role("learner", silent_s=40.0)), "learner has been silent for 40 s"),
    (
        situation(role("learner", silent_s=40.0, does=Doing("play", 0.0, "blocked by my.py, line 3"))),
        "learner is blocked by my.py, line 3 and has been silent for 40 s",
    ),
    (
        situation(role("learner", does=Doing("train", 0.0, silent="rank 1 of 2"), part_silent_s=9.0)),
        "learner's rank 1 of 2 has been silent for 9 s",
    ),
    (situation(role("learner", does=None)), "learner has been starting"),
    (
        situation(role("learner", does=Doing("start", 0.0), restarts=2)),
        "learner has been starting (restart 2) for 31 s",
    ),
    (
        situation(role("learner", does=Doing("start", 0.0, "loading the model: 12 of 30 GB, 20 s left"))),
        "learner is loading the model: 12 of 30 GB, 20 s left",
    ),
    (
        situation(role("learner", runs=False, restarts=3)),
        "learner does not run (restart 3), see logs/learner.log",
    ),
    (situation(role("learner", runs=False, placed=False)), "learner waits for room on a host"),
    # Labels.
    (
        situation(role("scoring-0", silent_s=40.0), shards=[SCORES]),
        f"{WAITS}3 of 8 groups wait for labels: scoring-0 has been silent for 40 s",
    ),
    (
        situation(shards=[SCORES]),
        f"{WAITS}3 of 8 groups wait for labels: scoring-0 scores 5 trajectories, and 9 more wait",
    ),
    (
        situation(role("scoring-1", silent_s=40.0), shards=[SCORES]),
        f"{WAITS}3 of 8 groups wait for labels: scoring-0 scores 5 trajectories, and 9 more wait",
    ),
    (
        situation(
            role("scoring-0", runs=False),
            role("scoring-1", silent_s=99.0),
            shards=[ShardNow("replay", 8, scoring=9, waiting=36)],
        ),
        f"{WAITS}8 of 8 groups wait for labels: scoring-1 (and 1 more) has been silent for 99 s",
    ),
    (
        situation(role("scoring-0", row={"unavailable": "judge: connection refused"}), shards=[SCORES]),
        f"{WAITS}3 of 8 groups wait for labels: scoring-0 cannot reach a service that it needs: judge: connection "
        "refused",
    ),
    # Episodes.
    (situation(shards=[PLAYS]), f"{WAITS}2 of 8 groups wait for episodes: actor-0 and 1 more play 12 episodes"),
    (
        situation(role("actor-1", silent_s=40.0), shards=[PLAYS]),
        f"{WAITS}2 of 8 groups wait for episodes: actor-1 has been silent for 40 s",
    ),
    (
        situation(role("actor-0", row={"servers": 4, "servers_ready": 0}), shards=[PLAYS]),
        f"{WAITS}2 of 8 groups wait for episodes: actor-0 has no server that takes requests: 0 of 4 are ready",
    ),
    (
        situation(role("actor-1", row={"version": 10}), shards=[PLAYS], version=13, max_lag=2),
        f"{WAITS}2 of 8 groups wait for episodes: actor-1 waits for weights of version 11 and serves version 10",
    ),
    (
        situation(
            role("actor-1", row={"version": 11}),
            role("actor-0", row={"version": 11}),
            shards=[replace(PLAYS, needs={"actor-0": 11, "actor-1": 13})],
            version=13,
            max_lag=2,
        ),
        f"{WAITS}2 of 8 groups wait for episodes: actor-1 waits for weights of version 13 and serves version 11",
    ),
    (
        situation(
            role("actor-0", row={"version": 11}),
            shards=[replace(PLAYS, ready=9, needs={"actor-0": 12}, old_groups=OLD_GROUPS)],
            version=13,
            max_lag=2,
        ),
        f"{WAITS}{OLD_GROUPS}: actor-0 waits for weights of version 12 and serves version 11",
    ),
    (
        situation(role("actor-1", row={"version": 11}), shards=[PLAYS], version=13, max_lag=2),
        f"{WAITS}2 of 8 groups wait for episodes: actor-0 and 1 more play 12 episodes",
    ),
    (
        situation(role("actor-0", row={"idle": 0.95, "running": 9}), shards=[PLAYS]),
        f"{WAITS}2 of 8 groups wait for episodes: actor-0 plays 9 episodes, and its engine was idle for 95% of the "
        "last seconds: the tools, users or agents of the episodes take long",
    ),
    (
        situation(shards=[ShardNow("replay", 8, playing=8, pending=32)]),
        f"{WAITS}8 of 8 groups wait for episodes: 32 tickets wait for an actor, and no actor takes them",
    ),
    # The replay.
    (
        situation(shards=[ShardNow("replay", 8, is_full=True)]),
        f"{WAITS}replay issues no tickets, since its store is full: raise replay.max_store_gb, or keep less with "
        "replay.retention",
    ),
    (
        situation(shards=[ShardNow("replay", 8, failing="the last 32 episodes failed")]),
        f"{WAITS}replay issues few tickets: the last 32 episodes failed",
    ),
    (
        situation(shards=[ShardNow("replay", 8, playing=4, refusing="the filter refused the last 32 groups")]),
        f"{WAITS}replay has no group to train: the filter refused the last 32 groups",
    ),
    (situation(shards=[ShardNow("replay", 8, answers=False)]), f"{WAITS}replay does not answer"),
    (situation(shards=[replace(PLAYS, busy=NO_ROOM)]), f"{WAITS}replay postpones requests: {NO_ROOM}"),
    (situation(shards=[ShardNow("replay", 8, ready=8, busy=NO_ROOM)]), f"{WAITS}replay postpones requests: {NO_ROOM}"),
    (situation(LEARNS, shards=[replace(PLAYS, busy=NO_ROOM)]), f"replay postpones requests: {NO_ROOM}"),
    (
        situation(role("replay", does=Doing("start", 0.0), restarts=1), shards=[replace(PLAYS, busy=NO_ROOM)]),
        f"{WAITS}replay postpones requests: {NO_ROOM}",
    ),
    (
        situation(
            shards=[ShardNow("replay-0", 8, ready=2), ShardNow("replay-1", 8, ready=7, busy=NO_ROOM)],
        ),
        f"{WAITS}replay-1 postpones requests: {NO_ROOM} (1 more shard lacks groups)",
    ),
    (
        situation(role("replay", silent_s=12.0), shards=[ShardNow("replay", 8, answers=False)]),
        f"{WAITS}replay has been silent for 12 s",
    ),
    # Actors without tickets, while the learner trains.
    (
        situation(LEARNS, shards=[FULL], version=12, max_lag=2, group_size=4),
        "replay issues no tickets: 24 of 24 trajectories are admitted at version 12 (replay.max_lag=2): learner trains "
        "step 12 for 31 s",
    ),
    (
        situation(LEARNS, shards=[replace(FULL, age_bound=40)], version=12, max_lag=4, group_size=4),
        "replay issues no tickets: 24 of 24 trajectories are admitted at version 12 (replay.max_lag=4 allows 40, "
        "replay.spare_batches fewer): learner trains step 12 for 31 s",
    ),
    (
        situation(LEARNS, role("replay", silent_s=12.0), shards=[ShardNow("replay", 8, answers=False)]),
        "replay has been silent for 12 s",
    ),
    # Evaluations.
    (
        situation(MEASURES, shards=[ShardNow("replay", 8, held_out_playing=5, actors={"actor-0": 5})], version=3),
        "learner waits for the evaluation of version 3 for 31 s: 5 held-out episodes are not done: actor-0 plays 5 "
        "episodes",
    ),
    (
        situation(
            MEASURES,
            role("scoring-0", silent_s=60.0),
            shards=[ShardNow("replay", 8, held_out_scoring=5, scorers={"scoring-0": 5})],
        ),
        "learner waits for the evaluation of version 0 for 31 s: 5 held-out episodes wait for labels: scoring-0 has "
        "been silent for 60 s",
    ),
    # Several shards: the one that lacks most.
    (
        situation(shards=[ShardNow("replay-0", 4, ready=3, scoring=2), ShardNow("replay-1", 4, ready=1, scoring=3)]),
        f"{WAITS}3 of 4 groups of replay-1 wait for labels (1 more shard lacks groups): 0 trajectories wait for a "
        "scorer, and no scorer takes them",
    ),
    # Roles that were started by hand: only their requests tell of them.
    (
        Situation(
            [ShardNow("replay", 8, ready=5, scoring=3, scorers={"s": 5}, silence_s={"s": 20.0}, learner_waits_s=52.0)],
            step=1,
        ),
        "learner waits for the batch of step 1 for 52 s: 3 of 8 groups wait for labels: s has been silent for 20 s",
    ),
]


@pytest.mark.parametrize(("now", "says"), CASES, ids=range(len(CASES)))
def test_the_chain_ends_at_the_cause(now: Situation, says: str) -> None:
    assert sentence(chain(now)) == says


def test_no_chain_has_more_than_three_links() -> None:
    assert max(len(chain(now)) for now, _ in CASES) == 3


@pytest.mark.parametrize(
    ("now", "held_up"),
    [
        (situation(shards=[SCORES]), False),
        (situation(role("scoring-0", silent_s=40.0), shards=[SCORES]), True),
        (situation(role("scoring-0", runs=False), shards=[SCORES]), True),
        (situation(role("learner", silent_s=40.0)), True),
        (situation(shards=[ShardNow("replay", 8, answers=False)]), True),
        (situation(shards=[ShardNow("replay", 8, busy=NO_ROOM)]), True),
        (situation(shards=[ShardNow("replay", 8, failing="the disk is full")]), True),
    ],
)
def test_a_wait_says_whether_a_fault_is_its_cause(now: Situation, held_up: bool) -> None:
    assert any(wait.fault for wait in chain(now)) is held_up


def test_a_silent_role_is_a_fault_although_nobody_waits_for_it() -> None:
    now = situation(LEARNS, role("scoring-1", silent_s=40.0), role("actor-1", runs=False))
    assert {name: str(wait) for name, wait in faults(now).items()} == {
        "scoring-1": "scoring-1 has been silent for 40 s",
        "actor-1": "actor-1 does not run, see logs/actor-1.log",
    }
    assert faults(situation()) == {}
