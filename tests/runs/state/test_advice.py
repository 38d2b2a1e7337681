"""Advice follows from the numbers, and there is none without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.run import ModelConfig
from asyncrl.runs.from_config import settings_of
from asyncrl.runs.shares import IdleShares
from asyncrl.runs.state.advice import MUCH_TOO_OLD, advise

WAITS = "the learner was idle for 42% of the last 20 steps, 38% waiting for"
SERVED = "the learner waited for 1% of the last 20 steps"


def shares(**changes: Any) -> IdleShares:
    given: dict[str, Any] = {
        "steps": 20,
        "learner_idle": 0.1,
        "waited": {"labels": 0.0, "episodes": 0.0, "store": 0.0},
        "phases": {"train": 0.9},
        "actors": 2,
        "actors_idle": 0.3,
        "scorers": 1,
        "scorers_idle": 0.5,
    }
    return IdleShares(**{**given, **changes})


def starved(cause: str, **changes: Any) -> IdleShares:
    return shares(learner_idle=0.42, waited={"labels": 0.01, "episodes": 0.02, cause: 0.38}, **changes)


KEPT = "; or keep such groups with a longer replay.old_groups.wait_s (docs/replay.md#groups-that-become-too-old)"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (shares(), []),
        (
            starved("episodes", actors_idle=0.03),
            [f"{WAITS} episodes, while engines were busy for 97%: add engines (cluster.actors=3)"],
        ),
        (
            starved("episodes", actors_idle=0.0, loops_busy=0.85),
            [f"{WAITS} episodes, while engines were busy for 100%: add engines (cluster.actors=3)"],
        ),
        (
            starved("episodes", actors_idle=0.03, cores=3),
            [f"{WAITS} episodes, while engines were busy for 97%: the 3 cores of this machine limit the run"],
        ),
        (
            starved("episodes", actors_idle=0.03, cores=4),
            [f"{WAITS} episodes, while engines were busy for 97%: add engines (cluster.actors=3)"],
        ),
        (
            starved("episodes", actors_idle=0.5),
            [
                f"{WAITS} episodes, while engines were busy for 50%, since admission allowed no more episodes: raise "
                "replay.max_lag from 2 to 3"
            ],
        ),
        (
            starved("episodes", actors_idle=0.5, pending=12.0),
            [
                f"{WAITS} episodes, while engines were busy for 50% and 12 tickets waited for an actor: raise "
                "actor.concurrency from 64 to 128"
            ],
        ),
        (
            starved("labels", scorers_idle=0.01),
            [f"{WAITS} labels, while scorers were busy for 99%: set cluster.scorers=2"],
        ),
        (
            starved("labels", scorers_idle=0.7),
            [
                f"{WAITS} labels, while scorers were busy for 30%: more scorers do not help; a single label takes "
                "long, so look at the slowest part of the reward"
            ],
        ),
        (starved("labels", scorers_idle=None), []),
        (
            starved("store"),
            [f"{WAITS} room in the store: raise replay.max_store_gb from 64, or keep less with replay.retention"],
        ),
        (
            starved("old_groups"),
            [
                f"{WAITS} groups that would have become too old: raise replay.max_lag from 2 to 3, or set "
                "replay.old_groups.wait_s=0"
            ],
        ),
        (
            shares(learner_idle=0.42, waited={"labels": 0.01, "episodes": 0.2, "store": 0.0, "old_groups": 0.15}),
            [
                "the learner was idle for 42% of the last 20 steps, 20% waiting for episodes and 15% waiting for "
                "groups that would have become too old: see `asyncrl trace RUN --explain-step STEP`"
            ],
        ),
        (shares(learner_idle=0.42), []),
        (
            shares(learner_idle=0.01, actors_idle=0.6),
            [
                f"{SERVED}, while engines were idle for 60%: use cluster.actors=1, or give the learner more GPUs; "
                "a learner.batch_size above 128 also keeps the engines busy"
            ],
        ),
        (
            shares(learner_idle=0.01, scorers=3, scorers_idle=0.9),
            [f"{SERVED}, while 3 scorers were idle for 90%: cluster.scorers=2 is enough"],
        ),
        (
            shares(too_old=0.14),
            [
                "14% of the sampled tokens of the last 20 steps were thrown away as too old: "
                "raise replay.max_lag from 2 to 3, or lower "
                f"actor.concurrency from 64{KEPT}"
            ],
        ),
        (
            shares(too_old=0.14, learner_idle=0.42),
            [
                "14% of the sampled tokens of the last 20 steps were thrown away as too old: "
                "raise replay.max_lag from 2 to 3; or lower "
                "actor.concurrency from 64, if engines make as many tokens a second with fewer requests at once"
                f"{KEPT}"
            ],
        ),
        (
            starved("episodes", actors_idle=0.5, pending=12.0, too_old=0.14),
            [
                "14% of the sampled tokens of the last 20 steps were thrown away as too old: "
                "raise replay.max_lag from 2 to 3; or lower "
                "actor.concurrency from 64, if engines make as many tokens a second with fewer requests at once"
                f"{KEPT}"
            ],
        ),
        (
            shares(phases={"publish": 0.3}),
            ["publishing weights took 30% of the last 20 steps: raise learner.publish_every from 1 to 2"],
        ),
    ],
)
def test_advice_names_its_numbers_and_keys(seen: IdleShares, says: list[str]) -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.engine.kind = "embedded"
    config.learner.batch_size = 128
    assert advise(seen, settings_of(config)) == says


def test_an_actor_that_uses_a_whole_core_is_told_apart_from_busy_servers() -> None:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.engine.kind = "sglang"
    [advice] = advise(starved("episodes", actors_idle=0.0, loops_busy=0.97), settings_of(config))
    assert "each actor used 97% of a core, so that servers wait for their actors: set cluster.actors=3" in advice


def test_servers_are_added_by_their_own_key() -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.engine.kind, config.engine.server.count = "sglang", 4
    assert "engine.server.count=5" in advise(starved("episodes", actors_idle=0.0), settings_of(config))[0]


def test_a_learner_that_hardly_waits_and_does_not_pace_is_told_to() -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.replay.spare_batches = None
    assert advise(shares(too_old=0.14), settings_of(config)) == [
        "14% of the sampled tokens of the last 20 steps were thrown away as too old, while the learner hardly waits: "
        "set "
        f"replay.sampler.kind=oldest replay.spare_batches=0.5{KEPT}"
    ]
    config.replay.sampler.max_times_sampled = 2
    assert "spare_batches" not in advise(shares(too_old=0.14), settings_of(config))[0], "it would have no effect"


def test_groups_that_are_too_old_can_be_kept_by_what_is_not_set_yet() -> None:
    config, seen = TrainConfig(model=ModelConfig(path="model")), shares(too_old=0.14)
    ways = "keep such groups with replay.old_groups.mask=true or a longer replay.old_groups.wait_s (docs"
    config.replay.old_groups.mask = False
    assert ways in advise(seen, settings_of(config))[0]
    assert advise(starved("old_groups"), settings_of(config))[0].endswith(
        "or set replay.old_groups.wait_s=0, with replay.old_groups.mask=true, which trains groups without their tokens "
        "that are too old"
    )
    config.replay.old_groups.wait_s = 60.0
    assert "keep such groups with replay.old_groups.mask=true (docs" in advise(seen, settings_of(config))[0]
    config.replay.old_groups.mask = True
    assert "mask=true" not in advise(starved("old_groups"), settings_of(config))[0]
    assert "replay.old_groups" not in advise(seen, settings_of(config))[0]


def test_the_page_about_old_groups_names_the_share_from_which_there_is_advice() -> None:
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    assert f"**When to act.** Change something if more than {MUCH_TOO_OLD:.0%} of the sampled tokens" in page


def test_no_advice_names_a_mask_that_a_start_would_refuse() -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.replay.old_groups.mask, config.implicit.train = False, True
    assert "mask" not in advise(shares(too_old=0.14), settings_of(config))[0]
    assert "mask" not in advise(starved("old_groups"), settings_of(config))[0]


def test_slow_servers_are_named_with_what_mends_them_while_the_learner_waits() -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.engine.kind, config.engine.server.per_gpu, config.actor.concurrency = "sglang", 2, 512
    slow: dict[str, Any] = {"without_graphs": 2.0, "queued": 21.0, "scheduler_busy": 0.97}
    graphs, queue, scheduler, *_ = advise(starved("episodes", actors_idle=0.0, **slow), settings_of(config))
    assert graphs.startswith("on average 2.0 servers decoded without CUDA graphs: remove arguments about graphs")
    assert queue.startswith("on average 21 requests waited in servers: remove --max-running-requests")
    assert queue.endswith("or lower actor.concurrency from 512")
    assert scheduler == (
        "the scheduler of a server took 97% of a core, which limits the server: set engine.server.per_gpu=3"
    )
    assert advise(shares(**slow), settings_of(config)) == [], "the learner does not wait"
    few: dict[str, Any] = {"without_graphs": 0.2, "queued": 3.0, "scheduler_busy": 0.5}
    assert len(advise(starved("episodes", actors_idle=0.0, **few), settings_of(config))) == 1


def test_a_server_of_several_gpus_gets_no_advice_to_share_one() -> None:
    config = TrainConfig(model=ModelConfig(path="model"))
    config.engine.kind, config.engine.server.tp_size = "sglang", 2
    advice = advise(starved("episodes", actors_idle=0.5, scheduler_busy=0.97), settings_of(config))
    assert advice[0].endswith("which limits the server: add GPUs for servers")
