"""The rule of `cluster.autoscale`: what it names as the limit, and that it changes numbers slowly and within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.cluster import AutoscaleConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.autoscale import Autoscaler, Patience, RunSizes, ScaleChange, Workload, wished_change
from asyncrl.observe.sinks import JsonLines, metrics_file

EVEN = Workload(learner_idle=0.1, actors_idle=0.2, scorers_idle=0.3, waiting_batches=0.5, lag_share=0.5)
MORE_ACTORS = ScaleChange("actors", +1, "a test")


@pytest.mark.parametrize(
    ("seen", "change"),
    [
        ({}, None),
        ({"learner_idle": 0.5, "actors_idle": 0.0}, ("actors", +1)),
        ({"learner_idle": 0.5, "scorers_idle": 0.0, "waiting_batches": 2.0}, ("scorers", +1)),
        ({"learner_idle": 0.5, "scorers_idle": 0.0, "waiting_batches": 2.0, "actors_idle": 0.0}, ("scorers", +1)),
        ({"learner_idle": 0.5, "scorers_idle": 0.0, "actors_idle": 0.0}, ("actors", +1)),
        ({"learner_idle": 0.5, "loops_busy": 0.95}, ("actors", +1)),
        ({"learner_idle": 0.1, "loops_busy": 0.95}, None),
        ({"learner_idle": 0.5}, None),
        ({"learner_idle": 0.0, "actors_idle": 0.6}, ("actors", -1)),
        ({"learner_idle": 0.0, "lag_share": 1.0}, ("actors", -1)),
        ({"learner_idle": 0.0, "scorers_idle": 0.9}, ("scorers", -1)),
        ({"learner_idle": 0.0, "scorers_idle": 0.9, "waiting_batches": 3.0}, None),
        ({"learner_idle": 0.1, "actors_idle": 0.9, "scorers_idle": 0.9, "lag_share": 1.0}, None),
    ],
)
def test_the_rule_names_what_limits_the_run(seen: Mapping[str, float], change: tuple[str, int] | None) -> None:
    wished = wished_change(replace(EVEN, **seen))
    assert (wished and (wished.name, wished.by)) == change
    assert wished is None or "the learner waits for" in wished.reason


def test_actors_that_use_a_whole_core_are_named_as_the_reason() -> None:
    wished = wished_change(replace(EVEN, learner_idle=0.5, actors_idle=0.0, loops_busy=0.97))
    assert wished is not None
    assert "each actor uses 97% of a core, so that servers wait for their actors" in wished.reason


def test_a_change_passes_only_when_it_was_wanted_several_times_in_a_row() -> None:
    patience, counts = Patience(AutoscaleConfig(actors=[1, 9], patience=3)), {"actors": 4, "scorers": 1}
    fewer = ScaleChange("actors", -1, "a test")
    wished = [MORE_ACTORS, MORE_ACTORS, None, MORE_ACTORS, fewer, MORE_ACTORS, MORE_ACTORS, MORE_ACTORS, MORE_ACTORS]
    assert [patience.passes(each, counts) for each in wished] == [False] * 7 + [True, False]


def test_numbers_stay_within_their_bounds_and_without_bounds_they_stay() -> None:
    patience = Patience(AutoscaleConfig(actors=[2, 4], patience=1))
    assert [patience.passes(MORE_ACTORS, {"actors": count}) for count in (3, 4)] == [True, False]
    assert not patience.passes(ScaleChange("actors", -1, "a test"), {"actors": 2})
    assert not patience.passes(ScaleChange("scorers", +1, "a test"), {"scorers": 2})


def test_the_metrics_of_a_run_change_its_numbers_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config, asked, now = TrainConfig(), list[Mapping[str, int]](), [0.0]
    config.cluster.autoscale = AutoscaleConfig(actors=[1, 2], every_s=10.0, patience=2)
    sinks = {name: JsonLines(metrics_file(tmp_path, name)) for name in ("learner", "replay", "actor-0", "scoring-0")}

    def scale(counts: Mapping[str, int]) -> None:
        asked.append(counts)
        if len(asked) == 1:
            raise ConfigError("there is no room")

    scaler = Autoscaler(config.cluster, RunSizes(1, 64, 4), tmp_path, scale, lambda: now[0])
    for step in range(5):
        now[0] += 10.0
        scaler.update()
        sinks["learner"].log(step, {"idle": 0.6, "lag/mean": 0.0})
        sinks["replay"].log(step, {"depth_waiting": 3})
        sinks["actor-0"].log(step, {"idle": 0.02})
        sinks["scoring-0"].log(step, {"idle": 0.4})
        scaler.update()
    assert asked == [{"actors": 2}, {"actors": 2}]
    reason = "the learner waits for 60% of its time, and actors are idle for 2%"
    assert f"cluster.autoscale wants actors=2 ({reason}), which is refused: there is no room" in caplog.text
    assert f"cluster.autoscale: actors=2, since {reason}" in caplog.text


def test_a_number_that_somebody_set_beyond_the_bounds_comes_back_and_goes_no_further() -> None:
    patience = Patience(AutoscaleConfig(actors=[3, 8], patience=1))
    fewer = ScaleChange("actors", -1, "a test")
    assert patience.passes(fewer, {"actors": 12})
    assert not patience.passes(MORE_ACTORS, {"actors": 12})
    assert patience.passes(MORE_ACTORS, {"actors": 1})
    assert not patience.passes(fewer, {"actors": 1})


def test_what_processes_wrote_before_they_were_started_again_says_nothing_of_the_run_now(tmp_path: Path) -> None:
    config, asked, now = TrainConfig(), list[Mapping[str, int]](), [0.0]
    config.cluster.autoscale = AutoscaleConfig(actors=[1, 9], every_s=1.0, patience=1)
    sinks = {
        name: JsonLines(metrics_file(tmp_path, name))
        for name in ("learner", "replay", "actor-0", "actor-1", "scoring-0")
    }

    def write(step: int, *names: str) -> None:
        for name in names:
            sinks[name].log(step, {"idle": 0.6 if name == "learner" else 0.02, "lag/mean": 0.0, "depth_waiting": 0})

    def scale(counts: Mapping[str, int]) -> None:
        asked.append(counts)
        config.cluster.actors = counts["actors"]

    scaler = Autoscaler(config.cluster, RunSizes(1, 64, 4), tmp_path, scale, lambda: now[0])

    def look() -> list[Mapping[str, int]]:
        now[0] += 1.0
        scaler.update()
        return asked

    write(4, *sinks)
    assert look() == [], "all of this is of the run before it was resumed"
    others = [name for name in sinks if name != "actor-1"]
    write(5, *others)
    assert look() == [{"actors": 2}]
    write(6, *others)
    assert look() == [{"actors": 2}], "actor-1 starts, and its metrics are those of an earlier one"
    write(7, *sinks)
    assert look() == [{"actors": 2}, {"actors": 3}]


def test_a_scorer_with_several_shards_is_idle_while_all_of_its_workers_are(tmp_path: Path) -> None:
    config, asked, now = TrainConfig(), list[Mapping[str, int]](), [0.0]
    config.cluster.autoscale = AutoscaleConfig(scorers=[1, 3], every_s=1.0, patience=1)

    def scale(counts: Mapping[str, int]) -> None:
        asked.append(counts)
        config.cluster.scorers = counts["scorers"]

    scaler = Autoscaler(config.cluster, RunSizes(2, 64, 4), tmp_path, scale, lambda: now[0])

    def write(step: int, learner_idle: float, scorers: Mapping[str, float]) -> None:
        rows = {"learner": learner_idle, "actor-0": 0.5, "replay-0": 0.0, "replay-1": 0.0}
        for name, idle in {**rows, **{f"scoring-{worker}": idle for worker, idle in scorers.items()}}.items():
            values = {"idle": idle, "lag/mean": 0.0, "depth_waiting": 50}
            JsonLines(metrics_file(tmp_path, name), lambda: float(step)).log(step, values)

    def look() -> list[Mapping[str, int]]:
        now[0] += 1.0
        scaler.update()
        return asked

    first = {"0-shard-0": 0.9, "0-shard-1": 0.9}
    write(0, 0.6, first)
    assert look() == []
    write(1, 0.6, {**first, "0-shard-0": 0.3, "0-shard-1": 0.4})
    assert look() == [], "it was idle for 12%"
    write(2, 0.6, {"0-shard-1": 0.1})
    assert look() == [{"scorers": 2}], "it was idle for 3%: its other worker has no newer row"
    write(3, 0.6, {"0-shard-0": 0.0, "0-shard-1": 0.0})
    assert look() == [{"scorers": 2}], "the second scorer has written nothing yet"
    write(4, 0.6, {"0-shard-0": 0.0, "0-shard-1": 0.0, "1-shard-1": 0.1})
    look()
    write(5, 0.6, {"1-shard-1": 0.1})
    assert look() == [{"scorers": 2}, {"scorers": 3}], "one of its workers has"
    for step, count in ((6, 1), (7, 2)):
        config.cluster.scorers = count
        write(step, 0.6, first)
        look()
    write(8, 0.6, {"0-shard-0": 0.0})
    assert len(look()) == 2, "the second scorer is a new one, and has written nothing yet"
