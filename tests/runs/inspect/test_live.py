"""A replay at work, over real sockets: its status, and changes; and the same where none runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from asyncrl.config.locations import record_config
from asyncrl.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from asyncrl.data.writing import write_tasks
from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.from_config import replay_settings
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.inspect.changes import Change, ChangeResult, change_all, discard, requeue, skip_plan
from asyncrl.runs.inspect.table import dead_letter_table, describe_dead_letters, status_table
from asyncrl.runs.processes import ProcessRecord
from asyncrl.runs.progress import RunProgress
from asyncrl.runs.run import Run
from asyncrl.runs.state.live import LiveReplay
from asyncrl.runs.state.status import describe, sample
from asyncrl.runs.state.watch import Stalls
from tests.helpers import GENEROUS_S, make_labels, make_task, make_trajectory
from tests.replay.support import Core
from tests.runs.inspect.serve import OWN_RUN
from tests.runs.inspect.support import make_run, printed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WAIT_S = 5.0


class AtWork:
    """A store that another process serves, a client that works with it, and the commands that look at both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._replay = subprocess.Popen(
            [sys.executable, "-m", "tests.runs.inspect.serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._replay.stdout is not None
        endpoint = self._replay.stdout.readline().strip()
        self.run, self.endpoints = Run(folder.parent, folder), [endpoint]
        self.worker = ReplayClient(endpoint, "worker", "1", run=OWN_RUN)

    def status(self) -> dict[str, Any]:
        with closing(StoredRun(self.folder)) as stored:
            live = self.live(stored)
            before = sample(stored, live, 0.0)
            now, progress = sample(stored, live, 2.0), RunProgress(self.run)
            return describe(self.run, now, before, progress, None) | Stalls().values()

    def live(self, stored: StoredRun) -> LiveReplay:
        return LiveReplay(self.run, stored, WAIT_S, self.endpoints)

    def change(self, change: Change, *names: str) -> list[ChangeResult]:
        with closing(StoredRun(self.folder)) as stored:
            return [*change_all(self.live(stored), names, change)]

    def end(self) -> None:
        self.worker.close()
        self._replay.communicate()


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[AtWork]:
    running = AtWork(tmp_path / "replay")
    yield running
    running.end()


def test_the_status_of_a_replay_at_work(at_work: AtWork) -> None:
    with closing(StoredRun(at_work.folder)) as stored:
        live = at_work.live(stored)
        before = sample(stored, live, 10.0)
        tickets = at_work.worker.tickets([], 3)
        at_work.worker.put(make_trajectory(tickets[0]))
        at_work.worker.lease(["rules"], 9, 1000)
        told = {
            "actor-0": ProcessRecord("node-3", 7, 2),
            "learner": ProcessRecord("", 0, 0),
        }
        (at_work.folder.parent / "processes.json").write_bytes(msgspec.json.encode(told))
        learner, *actors = (
            JsonLines(metrics_file(at_work.folder.parent, name)) for name in ("learner", "actor-0", "actor-1")
        )
        learner.log(6, {"reward/mean": 0.75, "idle": 0.25})
        for actor in actors:  # Nothing runs as actor-1 any more.
            actor.log(0, {"tokens_per_s": 512.0, "idle": 0.5})
        now, progress = sample(stored, live, 12.0), RunProgress(at_work.run)
        status = json.loads(json.dumps(describe(at_work.run, now, before, progress, 40) | Stalls().values()))
    assert status["running"]
    assert status["processes"] == msgspec.to_builtins(told)
    assert status["admission"] == {"committed": 4, "capacity": 8}
    assert status["totals"]["accepted"] == 1
    assert (status["rates"]["accepted"], status["rates"]["trained"]) == (0.5, 0.0)
    assert status["states"]["leased"] == 1
    assert [(each["kind"], each["holds"]) for each in status["leases"]] == [("actors", 2), ("scorers", 1)]
    assert all(0 <= each["silence_s"] < 60 for each in status["leases"])
    assert status["oldest_ticket"]["id"] == tickets[1].id
    assert status["disk"]["high_water_bytes"] == 1 << 28
    shown = printed(status_table(status))
    for words in (
        *("step 7/40", "reward 0.75", "entropy -", "truncated -", "lag -", "learner idle 25%"),
        *("sampled tokens/s now 512", "engine idle 50%"),
        "running",
        "actor worker",
        "s ago",
        "node-3",
        "waits for room",
        f"oldest ticket   {tickets[1].id} with worker",
        "4/8",
    ):
        assert words in shown
    assert status["readers"] == []
    status["readers"] = [{"pid": 7, "command": "python -m slow \x1b[2J", "seconds": 75.2}]
    shown = " ".join(printed(status_table(status)).split())
    assert "process 7 has read one snapshot for 75 s, so the store cannot reuse space: python -m slow" in shown
    assert "\x1b" not in shown


def test_the_status_names_the_shards_that_do_not_run_and_reads_their_stores(tmp_path: Path) -> None:
    at_work = AtWork(tmp_path / "replay" / "0")
    make_run(tmp_path / "other").store.close()
    (tmp_path / "other" / "replay").rename(tmp_path / "replay" / "1")
    at_work.folder = tmp_path / "replay"
    at_work.run = Run(tmp_path, at_work.folder)
    at_work.endpoints.append("tcp://127.0.0.1:6")
    at_work.worker.tickets([], 1)
    status = at_work.status()
    assert status["running"]
    assert status["problem"].startswith(f"no replay serves {at_work.folder / '1'}")
    assert "running in part" in printed(status_table(status))
    at_work.end()
    status = at_work.status()
    assert not status["running"]
    assert status["problem"].count("no replay serves") == 2
    assert status["depths"]["tickets"] == 2
    assert status["leases"] == [{"kind": "actors", "worker": "worker", "holds": 1, "silence_s": None}]
    assert status["disk"]["high_water_bytes"] is None
    assert "not running" in printed(status_table(status))


def test_dead_letters_are_listed_put_back_and_discarded_and_one_that_is_unknown_is_refused(at_work: AtWork) -> None:
    first, second = (ticket.id for ticket in at_work.worker.tickets([], 2))
    at_work.worker.fail(first, "the tool fell over\x1b[2J")
    at_work.worker.fail(second, "out of patience")
    with closing(StoredRun(at_work.folder)) as stored:
        letters = stored.dead_letters()
    assert [(each["id"], each["attempts"]) for each in describe_dead_letters(letters)] == [(first, 1), (second, 1)]
    assert "the tool fell over�[2J" in printed(dead_letter_table(letters, 0))
    (back,) = at_work.change(requeue, first)
    assert (back.text, back.refused) == ("is requeued: its task runs again as a new group", False)
    unknown, done = at_work.change(discard, "t000000099.0.0", second)
    assert unknown.refused
    assert "there is no dead letter" in unknown.text
    assert not done.refused
    counts = at_work.worker.status()
    assert (counts["depth_dead"], counts["depth_again"]) == (0, 1)


@pytest.mark.parametrize(
    ("known", "why"), [(True, "serves another run"), (False, "address with --endpoint tcp"), (None, "no replay serves")]
)
def test_nothing_is_asked_where_no_replay_or_that_of_another_run_answers(
    at_work: AtWork, tmp_path: Path, known: bool | None, why: str
) -> None:
    name = at_work.worker.tickets([], 1)[0].id
    at_work.worker.fail(name, "broken")
    other = AtWork(tmp_path / "other")
    endpoints = at_work.endpoints if known else []
    if known is None:
        other.end()
    with closing(StoredRun(other.folder)) as stored, pytest.raises(UnavailableError, match=why):
        list(change_all(LiveReplay(other.run, stored, WAIT_S, endpoints), [name], discard))
    if known is not None:
        other.end()
    assert at_work.worker.status()["depth_dead"] == 1


def test_a_plan_is_skipped_through_the_replay_that_serves_it(at_work: AtWork) -> None:
    for ticket in at_work.worker.tickets([], 4):
        at_work.worker.put(make_trajectory(ticket))
    leases = at_work.worker.lease(["rules"], 4, 1000)
    at_work.worker.label([make_labels(lease.trajectory.id) for lease in leases])
    plan = at_work.worker.plan(0)
    assert plan is not None
    assert skip_plan(at_work.run, 0, "poison", at_work.live) == len(plan.ids)
    again = at_work.worker.plan(0)
    assert again is not None
    assert again.skipped == "poison"
    with pytest.raises(RefusedError, match="step 7 has no recorded plan"):
        skip_plan(at_work.run, 7, "poison", at_work.live)


def test_a_plan_is_skipped_in_the_store_of_a_run_that_has_ended(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", [make_task(index) for index in range(5)])
    config = TrainConfig(
        run=RunConfig(name="run", dir=str(tmp_path)),
        model=ModelConfig(path=str(tmp_path)),
        data=DataConfig(train=[str(tmp_path / "tasks.parquet")]),
    )
    config.learner.batch_size, config.learner.group_size = 4, 2
    core = Core(tmp_path / "run" / "replay", replay_settings(config))
    core.run_episodes(4)
    plan = core.plan(0)
    assert plan is not None
    core.store.close()
    record_config(config)
    run = Run(tmp_path / "run")
    assert skip_plan(run, 0, "poison", lambda stored: LiveReplay(run, stored, WAIT_S, ["tcp://127.0.0.1:9"])) == 4
    with run.stored() as stored:
        recorded = stored.plan(0)
        assert recorded == replace(plan, skipped="poison")
        assert len(stored.dead_letters()) == 4


def test_shards_that_do_not_answer_cost_a_look_one_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = 3
    together = threading.Barrier(shards, timeout=GENEROUS_S)

    def call(self: LiveReplay, shard: int, request: object) -> None:
        together.wait()
        raise UnavailableError(f"no answer from shard {shard}")

    monkeypatch.setattr(LiveReplay, "call", call)
    stored = cast("StoredRun", SimpleNamespace(shards=shards, each=lambda ask: [None] * shards))
    found = LiveReplay(Run(Path("run")), stored, WAIT_S).statuses()
    assert found == ([None] * 3, "; ".join(f"no answer from shard {shard}" for shard in range(shards)))
