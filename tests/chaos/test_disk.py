"""Full disks and damaged files: a clear error or recovery, never silent loss."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import RefusedError, StoppedError, StoreError
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.link import BUSY_S
from asyncrl.replay.store.store import TABLES, Store
from asyncrl.replay.stored import StoredRun
from asyncrl.types import Ticket, Trajectory
from tests.chaos.support import ReplayProcess, flip, read_or_refuse
from tests.helpers import GENEROUS_S, make_labels, make_trajectory, until

pytestmark = pytest.mark.slow

LENGTH = 8192
SIZES = (
    "learner.batch_size=8",
    "learner.group_size=2",
    "replay.durability=os",
    f"actor.max_tokens={LENGTH}",
    f"engine.max_length={LENGTH}",
)

Start = Callable[..., ReplayProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as started:
        yield lambda *overrides: started.enter_context(ReplayProcess(tmp_path, *SIZES, *overrides))


def long_trajectory(ticket: Ticket) -> Trajectory:
    """One that fills pages of its own, with its own tokens: no two are alike anywhere."""
    rng = np.random.default_rng(int(ticket.id.replace("t", "1").replace(".", "")))
    tokens = rng.integers(0, 1 << 30, LENGTH).astype(np.int32)
    return make_trajectory(ticket, ticket.min_version, LENGTH, tokens=tokens)


class Delivery:
    """Delivers one long trajectory for each of `tickets` in a thread; `acknowledged` grows meanwhile."""

    def __init__(self, client: ReplayClient, tickets: list[Ticket]) -> None:
        self._client, self._tickets = client, tickets
        self.acknowledged: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for ticket in self._tickets:
            assert self._client.put(long_trajectory(ticket)) in ("stored", "duplicate")
            self.acknowledged.append(ticket.id)

    def finish(self) -> None:
        self._thread.join(GENEROUS_S)
        assert len(self.acknowledged) == len(self._tickets)


def label_all(scorer: ReplayClient, count: int) -> set[str]:
    """Label waiting trajectories until there were at least `count`. Return their ids."""
    done: set[str] = set()
    while len(done) < count:
        names = [lease.trajectory.id for lease in scorer.lease(["rules"], 100, 1 << 30)]
        assert not any(scorer.label([make_labels(name) for name in names]))
        done.update(names)
    return done


def train(replay: ReplayProcess, steps: range) -> None:
    """Label waiting trajectories, and let a learner train and release `steps`."""
    scorer, learner = replay.client("s"), replay.client("l")
    for step in steps:
        while (plan := learner.plan(step)) is None:
            label_all(scorer, 1)
        assert [each.id for each in learner.fetch(plan.ids)] == list(plan.ids)
        learner.published(step + 1)
        learner.checkpointed(step + 1, step + 1)


@pytest.mark.heavy
def test_a_full_disk_makes_clients_wait_and_loses_nothing(start: Start) -> None:
    replay = start("replay.max_lag=4")
    actor = replay.client("a", retry_s=1.0)
    tickets = actor.tickets([], 16)
    Delivery(actor, tickets[:4]).finish()
    replay.limit_file_size(replay.data.stat().st_size)
    delivery = Delivery(actor, tickets[4:])
    replay.wait_for_log("cannot commit")
    assert len(delivery.acknowledged) < len(tickets[4:])
    acknowledged = [*(ticket.id for ticket in tickets[:4]), *delivery.acknowledged]
    stored = StoredRun(replay.store)
    assert all(stored.trajectory(name) is not None for name in acknowledged)
    stored.close()
    assert replay.process.poll() is None
    replay.limit_file_size(None)
    delivery.finish()
    audit = actor.audit()
    assert (audit["lost"], sum(audit["states"].values())) == (0, len(tickets))


class CountedWaits(threading.Event):
    """The `stop` of a client, which waits for nothing else; `begun` has the length of each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.append(timeout or 0.0)
        return super().wait(timeout)


@pytest.mark.heavy
def test_a_full_disk_holds_up_many_requests_no_longer_than_one(start: Start) -> None:
    replay = start("replay.max_lag=8")
    waits = [CountedWaits() for _ in range(2)]
    actors = [replay.client(f"a{number}", stop=each) for number, each in enumerate(waits)]
    tickets = [actor.tickets([], 16) for actor in actors]
    replay.limit_file_size(replay.data.stat().st_size)
    with ThreadPoolExecutor() as pool:
        delivered = [
            pool.submit(actor.put_all, [long_trajectory(each) for each in own])
            for actor, own in zip(actors, tickets, strict=True)
        ]
        until(lambda: all(len(each.begun) >= 4 for each in waits))
        until(lambda: "cannot commit" in replay.status()["busy"])
        replay.limit_file_size(None)
        before = [len(each.begun) for each in waits]
        assert [each.result(GENEROUS_S) for each in delivered] == [["stored"] * 16] * 2
    for each, count in zip(waits, before, strict=True):
        assert set(each.begun) == {BUSY_S}
        assert len(each.begun) - count <= 1, "the last refused round may have ended after there was room"
    until(lambda: not replay.status()["busy"])


def test_a_full_store_makes_actors_wait_until_training_has_made_room(start: Start) -> None:
    replay = start("replay.max_lag=8", "replay.max_store_gb=0.004")
    actor, other = replay.client("a", retry_s=1.0), replay.client("b")
    tickets = actor.tickets([], 72)
    delivery = Delivery(actor, tickets)
    replay.wait_for_log("a request must wait: PutTrajectory: the store is full")
    assert len(delivery.acknowledged) < len(tickets)
    until(lambda: "the store is full" in replay.status()["busy"])
    assert other.tickets([], 1) == []
    train(replay, range(9))
    delivery.finish()
    audit = other.audit()
    assert (audit["lost"], audit["trained_twice"], audit["states"]["trained"]) == (0, 0, 72)


@pytest.mark.heavy
def test_a_truncated_store_is_refused_with_what_to_do(start: Start) -> None:
    replay = start("replay.max_lag=4")
    actor = replay.client("a")
    Delivery(actor, actor.tickets([], 40)).finish()
    replay.kill()
    whole = replay.data.stat().st_size
    os.truncate(replay.data, whole // 2)
    replay.start()
    replay.fails_with(r"data\.mdb is truncated.*restore the folder from a copy, or start a new run")
    with pytest.raises(StoreError, match="truncated"):
        StoredRun(replay.store)
    for emptied in (True, False):
        replay.data.write_bytes(b"") if emptied else replay.data.unlink()
        replay.start()
        replay.fails_with(r"data\.mdb is missing or empty.*restore")


def test_an_unplanned_episode_with_a_flipped_bit_is_a_dead_letter_and_is_replaced(start: Start) -> None:
    replay = start()
    actor = replay.client("a")
    tickets = actor.tickets([], 8)
    Delivery(actor, tickets).finish()
    replay.kill()
    damaged = tickets[3]
    flip(replay.data, long_trajectory(damaged).tokens[100:110].tobytes(), 5)
    replay.start()
    scorer = replay.client("s")
    assert label_all(scorer, 7) == {ticket.id for ticket in tickets} - {damaged.id}
    [replacement] = actor.tickets([], 8)[:1]
    assert (replacement.group_id, replacement.member) == (damaged.group_id, damaged.member)
    status = scorer.status()
    assert (status["damaged"], status["dead"]) == (1, 1)
    Delivery(actor, [replacement]).finish()
    train(replay, range(1))
    assert actor.audit()["lost"] == 0
    stored = StoredRun(replay.store)
    assert [(ticket, "damaged" in letter.reason) for ticket, letter in stored.dead_letters()] == [(damaged.id, True)]
    stored.close()


def test_a_planned_episode_with_a_flipped_bit_is_an_error_to_the_learner(start: Start) -> None:
    replay = start()
    actor, scorer, learner = (replay.client(name) for name in ("a", "s", "l"))
    Delivery(actor, actor.tickets([], 8)).finish()
    label_all(scorer, 8)
    plan = learner.plan(0)
    assert plan is not None
    damaged = learner.fetch(plan.ids[:1])[0]
    replay.kill()
    flip(replay.data, damaged.tokens[100:110].tobytes(), 5)
    replay.start()
    assert learner.plan(0) == plan
    with pytest.raises(RefusedError, match=r"data\.mdb is damaged: data of .* is not what was written; restore"):
        learner.fetch(plan.ids)
    assert actor.audit()["lost"] == 1
    with pytest.raises(StoreError, match="is damaged"):
        StoredRun(replay.store).trajectory(damaged.id)


def test_a_damaged_record_ends_the_replay_with_what_to_do(start: Start) -> None:
    replay = start()
    stop = threading.Event()
    with closing(replay.client("a", stop=stop)) as actor, ThreadPoolExecutor() as pool:
        actor.tickets([], 1)
        replay.kill()
        flip(replay.data, b"committed", len(b"committed") + 8)
        replay.start()
        waiting = pool.submit(actor.tickets, [], 8)
        replay.fails_with(r"data\.mdb is damaged: meta of b'committed' is not what was written; restore")
        stop.set()
        with pytest.raises(StoppedError):
            waiting.result(GENEROUS_S)


def test_a_store_harmed_anywhere_is_read_as_it_was_or_not_at_all(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = Store(tmp_path / "store", 1 << 28, durable=False)
    for turn in range(20):
        with store.transaction() as tx:
            for index in range(turn * 10, turn * 10 + 10):
                tx.put_bytes("data", f"k{index}", rng.randbytes(rng.choice((200, 5000, 20000))))
                tx.put("trajectories", f"k{index}", ["group", index, 2, 3])
                tx.append("waiting", f"k{index}", queue="rules")
                tx.add_member("held", "worker", f"k{index}")
            tx.delete("data", f"k{turn * 5}")
    store.close()
    before = read_or_refuse(store.path)["values"]
    assert before.keys() == set(TABLES)
    copy = tmp_path / "copy"
    for trial in range(12):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store.path, copy)
        harm(copy / "data.mdb", rng, truncate=trial % 2 == 0)
        after = read_or_refuse(copy)
        assert after.get("values", before) == before
        assert "StoreError" in after["error"] or after["status"] != 0 if "error" in after else True


def harm(file: Path, rng: random.Random, truncate: bool) -> None:
    size = file.stat().st_size
    if truncate:
        os.truncate(file, rng.choice((rng.randrange(size), size - 4096 * rng.randint(1, 30))))
        return
    place = rng.randrange(size // 4096) * 4096 + rng.randrange(128)
    with file.open("r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 1 << rng.randrange(8)]))
