"""The summary of a store: what it counts cheaply equals the sums over all records."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

from rich.console import Console

from asyncrl.config.locations import steps_in_newest_checkpoint
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.store.records import TrajectoryRecord
from asyncrl.runs.inspect.table import status_table
from asyncrl.runs.progress import RunProgress, progress_rows
from asyncrl.runs.run import Run
from asyncrl.runs.state.live import LiveReplay
from asyncrl.runs.state.situation import situation
from asyncrl.runs.state.status import StatusSample, StoreSummary, describe, join, sample, summarise
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings
from tests.runs.inspect.support import make_episode, make_run, run_episodes
from tests.runs.support import write_run


def summary(core: Core, kept_steps: int = 0) -> StoreSummary:
    with core.store.transaction(write=False) as tx:
        return summarise(tx, kept_steps)


def trained(store: StoreSummary) -> tuple[int, int, Counter[str]]:
    return store.counters["trained"], store.counters["tokens_trained"], +store.counts["states"]


def states_by_reading_everything(core: Core) -> Counter[str]:
    with core.store.transaction(write=False) as tx:
        return Counter(record.state.value for _, record in TrajectoryRecord.all(tx))


def test_a_solved_shard_lacks_no_groups_while_another_one_still_has_some(tmp_path: Path) -> None:
    settings = Run(write_run(tmp_path / "run", [0.5])).settings()
    assert settings is not None
    core = Core(tmp_path / "replay", make_settings())
    shards = [summary(core)] * 2
    core.store.close()

    def wanted(*solved: str) -> list[int]:
        answers = [{"solved": text, "refusing": ""} for text in solved]
        return [
            each.wanted for each in situation(StatusSample(0.0, join(shards), shards, answers, ""), settings, {}).shards
        ]

    both = wanted("", "")
    assert min(both) > 0
    assert wanted("the policy solves these tasks", "") == [0, both[1]]
    assert wanted("the policy solves these tasks", "the policy solves these tasks") == both


def test_states_are_those_of_all_facts_at_every_point_of_a_run(tmp_path: Path) -> None:
    core = make_run(tmp_path, admission=Admission(max_lag=1, per_version=4, uses=2))
    seen: set[str] = set()
    planned = 0

    def check() -> None:
        counted = {state: count for state, count in summary(core).counts["states"].items() if count}
        assert counted == states_by_reading_everything(core)
        seen.update(counted)

    for turn in range(12):
        for ticket in core.tickets(4)[:3]:
            core.put(make_episode(ticket, planned))
        check()
        core.lease(1)
        check()
        core.tick(11)
        run_episodes(core, 16, planned)
        check()
        planned += core.plan(planned) is not None
        check()
        core.publish(planned + turn // 6)
        check()
        if turn % 3 == 2:
            foretold = trained(summary(core, planned - 1))
            core.checkpointed(planned - 1)
            check()
            assert trained(summary(core)) == foretold, (
                "what a checkpoint covers is trained before the replay hears of it"
            )
            assert trained(summary(core, planned - 1)) == foretold, "and is not counted twice"
    assert {"waiting", "leased", "labelled", "planned", "trained", "evicted"} <= seen


def test_a_checkpoint_of_another_run_trains_nothing(tmp_path: Path) -> None:
    core = make_run(tmp_path)
    run_episodes(core, 4)
    core.plan(0)
    assert trained(summary(core, 1))[0] == 4
    assert trained(summary(core, 2))[0] == 0, "so many steps were not planned"


def test_the_newest_checkpoint_is_found_among_folders_of_other_names(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000010", "step-000020-copy"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "complete").touch()
    assert steps_in_newest_checkpoint(tmp_path) == 10


def test_lags_are_versions_behind_the_newest_publish_and_behind_the_plan(tmp_path: Path) -> None:
    core = make_run(tmp_path)
    run_episodes(core, 8)
    core.publish(1)
    run_episodes(core, 4, version=1)
    assert summary(core).counts["ready_groups"] == {1: 4, 0: 2}
    core.plan(0)
    core.plan(1)
    after = summary(core)
    assert (after.counts["ready_groups"], after.counts["planned_trajectories"]) == ({0: 2}, {0: 4, 1: 4})
    assert after.steps == 2


def test_leases_are_counted_by_worker_and_the_oldest_ticket_is_that_of_the_first_group(tmp_path: Path) -> None:
    core = make_run(tmp_path)
    assert summary(core).oldest_ticket is None
    first = core.tickets(3, worker="a")
    core.tickets(2, worker="b")
    core.put(make_trajectory(first[0]))
    core.lease(worker="s")
    seen = summary(core)
    assert (seen.counts["actors"], seen.counts["scorers"]) == ({"a": 2, "b": 2}, {"s": 1})
    assert seen.oldest_ticket == (first[1].id, "a")


def test_an_actor_needs_the_oldest_version_that_may_start_one_of_its_episodes(tmp_path: Path) -> None:
    core = Core(tmp_path / "replay", make_settings(admission=Admission(4, 8), wait_s=60.0))
    first = core.tickets(1, worker="a")
    core.publish(1)
    core.tickets(2, worker="a", holding=[each.id for each in first])
    core.tickets(1, worker="b")
    assert summary(core).needs == {"a": 0, "b": 1}
    core.put(make_trajectory(first[0]))
    seen = summary(core)
    core.store.close()

    settings = Run(write_run(tmp_path / "run", [0.5])).settings()
    assert settings is not None
    for live in ({}, None):
        assert situation(StatusSample(0.0, seen, [seen], [live], ""), settings, {}).shards[0].needs == {"a": 1, "b": 1}


def test_failures_dead_letters_and_evictions_are_counted_by_reason(tmp_path: Path) -> None:
    core = make_run(tmp_path, max_attempts=1)
    run_episodes(core, 4)
    core.skip(core.planned(0).step)
    failed, unscored = core.tickets(2)
    core.fail(failed.id)
    core.put(make_episode(core.tickets(1)[0] if unscored.group_id == failed.group_id else unscored))
    while leased := core.lease():
        core.scoring_failed(leased[0].id)
    run_episodes(core, 4)
    core.publish(9)
    seen = summary(core)
    assert seen.counts["dead_letters"] == {"skipped plan": 4, "episode": 1, "scoring": 1}
    assert len(core.dead_letters()) == 6
    assert (seen.counters["failures"], seen.counters["scoring_failures"]) == (1, 1)
    assert seen.counts["evicted"] == {"too old": seen.counts["states"]["evicted"]}
    assert seen.counts["evicted"]["too old"] >= 4


def test_shards_are_summed(tmp_path: Path) -> None:
    shards = [make_run(tmp_path / str(number)) for number in range(2)]
    for number, core in enumerate(shards):
        run_episodes(core, 4 + 4 * number)
        core.tickets(1, worker=f"actor-{number}", life="9")
        core.publish(number)
    shards[1].plan(0)
    both = join([summary(core) for core in shards])
    assert both.selection.sampled.episodes == sum(summary(core).selection.sampled.episodes for core in shards)
    assert (both.counters["accepted"], both.counters["version"], both.steps) == (12, 1, 0)
    assert (both.counts["states"]["labelled"], both.counts["states"]["planned"]) == (8, 4)


def test_the_status_has_means_and_lengths_of_the_decided_episodes(tmp_path: Path) -> None:
    core = make_run(tmp_path)
    run_episodes(core, 4)
    core.publish(9)
    core.store.close()
    run = Run(tmp_path)
    with run.stored() as stored:
        status = describe(run, sample(stored, LiveReplay(run, stored, give_up_s=1.0), 0.0), None, RunProgress(run), 8)
    assert list(status["decided"]) == ["sampled", "evicted"]
    assert status["decided"]["evicted"]["episodes"] == sum(status["by_length"]["evicted"].values()) == 4
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status_table({**status, "errors": [], "waits_text": "", "advice": None}))
    shown = console.export_text()
    assert "decided episodes" in shown
    assert "by length" in shown


def test_the_status_of_an_ended_run_has_the_shares_of_which_its_warnings_speak(tmp_path: Path) -> None:
    make_run(tmp_path).store.close()
    run = Run(tmp_path)
    for name, values in {"learner": {"reward/mean": 0.5}, "actor-0": {"episodes": 200, "truncated": 200}}.items():
        JsonLines(metrics_file(tmp_path, name)).log(0, values)
    with run.stored() as stored:
        now = sample(stored, LiveReplay(run, stored, give_up_s=1.0), 0.0)
        status = describe(run, now, None, RunProgress(run), steps=8)
    assert not status["running"]
    assert status["warnings"][0].startswith("100% of the newest 200 episodes were truncated")
    assert status["progress"]["truncated"] == 1.0
    assert status["progress"]["malformed_calls"] is None
    assert ("truncated", "100%") in progress_rows(status["progress"], 8)
