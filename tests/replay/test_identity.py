"""A replay belongs to one run: every order says its run, and one of another run is refused by name and changes
nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import locations
from asyncrl.config.schema import RunConfig
from asyncrl.errors import AsyncrlError, ConfigError, RefusedError, StoreError
from asyncrl.learner.from_config import run as learn
from asyncrl.machine.activity import Activity
from asyncrl.replay.protocol import GetAudit, GetStatus
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store.store import Store
from asyncrl.types import RunIdentity
from tests.chaos.support import ReplayProcess
from tests.helpers import GENEROUS_S, until
from tests.learner.support import make_config, write_model
from tests.replay.support import Core, make_settings
from tests.replay.test_requests import VALID, fields, send

pytestmark = pytest.mark.slow

OWN = RunIdentity("run", "its id")
ORDERS = [request for request in VALID if not request.question]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayProcess]:
    """The replay of a run named "run", as a process of its own."""
    settings = ("learner.group_size=2", "learner.batch_size=4")
    with ReplayProcess(tmp_path_factory.mktemp("replay"), *settings) as running:
        yield running


def own(replay: ReplayProcess) -> RunIdentity:
    """The run's identity, as a process sees it that shares the run's folder."""
    return until(lambda: (found := locations.run_identity(RunConfig("run", str(replay.store.parents[1])))).id and found)


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ({"name": "other"}, r"run 'run' \(id its id\), not of 'other' \(id not known\)"),
        ({"name": "run", "id": "0" * 32}, r"run 'run' \(id its id\), not of 'run' \(id 0{32}\)"),
        (None, "names no run"),
        *((each, "malformed request") for each in ("run", ["run"], {"id": "its id"}, {"name": "run", "id": 1})),
    ],
)
def test_an_order_of_another_run_or_of_none_is_refused_and_changes_nothing(
    tmp_path: Path, theirs: Any, reason: str
) -> None:
    core = Core(tmp_path, make_settings(), run=OWN)
    before = core.status()
    for order in ORDERS:
        with pytest.raises(AsyncrlError, match=reason):
            send(core, order.kind, fields(order), run=theirs)
    assert core.status() == before


@pytest.mark.heavy
def test_a_run_that_is_served_again_knows_its_roles_and_they_know_it(replay: ReplayProcess) -> None:
    run = own(replay)
    with closing(replay.client("a", run=run)) as client, closing(replay.client("b", run=RunIdentity("run"))) as away:
        assert client.plan(0) is None
        replay.kill()
        replay.start()
        assert client.plan(0) is None
        assert away.plan(0) is None
    assert own(replay) == run


def test_a_learner_of_another_run_ends_with_both_names_and_releases_nothing(
    replay: ReplayProcess, tmp_path: Path
) -> None:
    config = make_config(write_model(tmp_path / "model", layers=1), tmp_path)
    config.run.name = "mine"
    config.network.replay_port = int(replay.endpoint.rpartition(":")[2])
    config.network.weights_port = 0
    with pytest.raises(ConfigError, match=r"replay of run 'run' \(id \w{32}\), not of 'mine' \(id \w{32}\)"):
        learn(config, threading.Event(), Activity(), GENEROUS_S)


def test_a_store_keeps_its_identity_and_shares_it_with_no_other(tmp_path: Path) -> None:
    core, other = (Core(tmp_path / name, make_settings(), run=OWN) for name in ("one", "other"))
    first = core.status()["identity"]
    assert first
    core.restart()
    assert core.status()["identity"] == first != other.status()["identity"]


def served(path: Path, run: RunIdentity) -> None:
    with closing(Store(path, 1 << 24, durable=False)) as store, store.transaction() as tx:
        ReplayService(make_settings(), 1.0, time.monotonic, run=run).start(tx)


def test_a_store_is_served_for_its_own_run_only(tmp_path: Path) -> None:
    for _ in range(2):
        served(tmp_path, OWN)
    for other in (RunIdentity("other", OWN.id), RunIdentity("run", "another")):
        with pytest.raises(StoreError, match=r"belongs to run 'run' \(id its id\), not to '\w+' \(id [\w ]+\)"):
            served(tmp_path, other)


def test_anybody_may_ask_how_a_run_is(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), run=OWN)
    for question in (GetStatus(), GetAudit()):
        core.ask(question)
        with pytest.raises(RefusedError, match="not of 'other'"):
            send(core, question.kind, {}, run={"name": "other"})


def test_processes_that_make_a_runs_id_at_once_agree_on_one_that_stays(tmp_path: Path) -> None:
    config = RunConfig("run", str(tmp_path))
    assert locations.run_identity(config) == RunIdentity("run")
    with ThreadPoolExecutor(16) as threads:
        made = {each.result() for each in [threads.submit(locations.run_identity, config, True) for _ in range(64)]}
    (identity,) = made
    assert identity.id
    assert locations.run_identity(config) == locations.run_identity(config, make=True) == identity
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["identity"]
    (tmp_path / "run" / "identity").write_text("")
    with pytest.raises(ConfigError, match="identity is empty"):
        locations.run_identity(config, make=True)
