"""Several hosts: launchers that start, watch and end their ranks together."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import chdir
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.learner.ranks.from_config import host_settings
from asyncrl.learner.ranks.hosts import open_host
from asyncrl.learner.ranks.launcher import RanksError, Timeouts, run_ranks
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.ranks.rendezvous import Alive, Caller, Joined
from asyncrl.machine.ports import free_ports
from asyncrl.network.keys import make_keys
from tests.helpers import until
from tests.learner.support import Run, assert_weights_close, assert_weights_equal, make_config

pytestmark = pytest.mark.slow

Weights = dict[int, dict[str, Tensor]]
SHORT = Timeouts(poll=0.05, heartbeat=0.1, silence=20.0, others=3.0)
RANK = """
import os, pathlib, time
from asyncrl.config.load import role_main
from asyncrl.config.schema import NetworkConfig
from asyncrl.learner.ranks.joining import joined
from asyncrl.machine.process import stop_on_signals
from asyncrl.network.keys import client_keys
def main(_):
    stop = stop_on_signals()
    with joined(keys=client_keys({keys!r})) as ranks:
        assert ranks.size == {size}
        ranks.activity.enter("train")
        assert ranks.agree(ranks.rank + 7) == 7
        pathlib.Path({folder!r}, str(ranks.rank)).write_text(str(os.getpid()))
        while {forever}:
            ranks.stop_if(stop.is_set())
            time.sleep(0.01)
raise SystemExit(role_main(main, ["model.path=none", "data.train={tasks}"]))
"""

TRAIN = """
import sys, torch
from pathlib import Path
from asyncrl.config.schema import NetworkConfig
from asyncrl.learner.ranks.joining import joined
from asyncrl.network.keys import client_keys
from tests.learner.support import Run, make_config
model, folder, steps, keys = sys.argv[1:]
with joined(keys=client_keys(keys)) as ranks:
    run = Run(make_config(Path(model), Path(folder), steps=int(steps))).train(ranks)
    if ranks.rank == 0:
        torch.save(run.weights, Path(folder, "weights.pt"))
"""


class Two:
    """Two hosts of some ranks each, which this machine plays on its loopback interface."""

    def __init__(self, folder: Path, ranks: int = 1, forever: bool = True) -> None:
        self.folder, self.ranks = folder, ranks
        tasks = folder / "tasks.parquet"
        tasks.touch()
        make_keys(folder / "keys")
        code = RANK.format(keys=str(folder / "keys"), folder=str(folder), forever=forever, tasks=tasks, size=2 * ranks)
        self.command = [sys.executable, "-c", code]
        self.stops = [threading.Event(), threading.Event()]
        self.config = TrainConfig(
            run=RunConfig(dir=str(folder)), model=ModelConfig(path="none"), data=DataConfig(train=[str(tasks)])
        )
        self.config.network.keys = str(folder / "keys")
        self.config.cluster.learner_ranks, self.config.learner.nodes = ranks, 2
        self.config.learner.rendezvous = f"127.0.0.2:{free_ports(1)}"
        self._threads = ThreadPoolExecutor(3)

    def start(self, node: int, timeouts: Timeouts = SHORT, config: TrainConfig | None = None) -> Future[None]:
        config = config or self.config
        config = replace(config, learner=replace(config.learner, node=node))

        def run() -> None:
            stop = self.stops[node]
            run_ranks(self.command, self.ranks, stop, timeouts, open_host(host_settings(config), timeouts, stop))

        return self._threads.submit(run)

    def pids(self) -> list[int]:
        files = [self.folder / str(rank) for rank in range(2 * self.ranks)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]


@pytest.mark.heavy
def test_ranks_of_two_hosts_with_keys_meet_and_end_well_and_no_mark_stays(tmp_path: Path) -> None:
    two = Two(tmp_path, ranks=2, forever=False)
    second, first = two.start(1), two.start(0)
    for each in (first, second):
        each.result()
    assert len(set(two.pids())) == 4
    assert not list((tmp_path / "train").glob(".host*"))


@pytest.mark.parametrize(
    ("victim", "act", "reason"),
    [
        (1, signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        pytest.param(0, signal.SIGKILL, "rank 0 of 2 was killed by SIGKILL", marks=pytest.mark.heavy),
        pytest.param(1, signal.SIGSTOP, "rank 1 of 2 has not run for", marks=pytest.mark.heavy),
    ],
)
def test_the_end_of_a_rank_ends_the_ranks_of_both_hosts_with_the_reason(
    victim: int, act: signal.Signals, reason: str, tmp_path: Path
) -> None:
    two = Two(tmp_path)
    timeouts = replace(SHORT, silence=10.0)
    running = [two.start(node, timeouts) for node in (0, 1)]
    os.kill(two.pids()[victim], act)
    for each in running:
        with pytest.raises(RanksError, match=f"{reason}.*; all ranks were ended$"):
            each.result()


def test_a_host_whose_ranks_cannot_be_configured_ends_both_for_good(tmp_path: Path) -> None:
    two = Two(tmp_path)
    body = "from asyncrl.learner.ranks.launcher import Membership; import sys, time\n"
    body += "sys.exit(2) if Membership.of_this_process().rank else time.sleep(1000)"
    two.command = [sys.executable, "-c", body]
    for each in [two.start(node) for node in (0, 1)]:
        with pytest.raises(ConfigError, match="rank 1 of 2 cannot run"):
            each.result()


@pytest.mark.heavy
def test_a_stop_of_one_host_stops_both(tmp_path: Path) -> None:
    two = Two(tmp_path)
    running = [two.start(node) for node in (0, 1)]
    two.pids()
    two.stops[1].set()
    for each in running:
        with pytest.raises(StoppedError):
            each.result()


@pytest.mark.long
def test_a_run_resumes_on_one_rank_on_two_hosts_of_two_and_on_two_ranks_as_if_it_had_one_all_the_time(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    two, folder = Two(tmp_path, ranks=2), tmp_path / "resumed"

    def train(steps: int, start: Callable[[], object]) -> Weights:
        two.command = [sys.executable, "-c", TRAIN, *map(str, (model, folder, steps, tmp_path / "keys"))]
        with chdir(Path(__file__).parents[3]):
            start()
        return dict(torch.load(folder / "weights.pt"))

    def on_hosts() -> None:
        for each in [two.start(node, replace(SHORT, stuck=200.0)) for node in (0, 1)]:
            each.result()

    parts = [Run(make_config(model, folder, steps=2)).train(ranks).weights]
    parts += [train(4, on_hosts), train(6, lambda: run_ranks(two.command, 2, threading.Event()))]
    parts += [Run(make_config(model, folder, steps=8)).train(ranks).weights]
    assert [list(part) for part in parts] == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]
    for before, after in pairwise(parts):
        assert_weights_equal(before[max(before)], after[min(after)])
    whole = Run(make_config(model, tmp_path / "whole", steps=8)).train(ranks)
    for part in parts:
        for version, weights in part.items():
            assert_weights_close(weights, whole.weights[version], atol=1e-5)
    exported = load_file(folder / "run" / "model" / "model.safetensors")
    assert_weights_equal({name: parts[-1][8][name] for name in exported}, exported)


def test_of_two_hosts_with_the_same_number_one_is_refused_while_others_are_awaited(tmp_path: Path) -> None:
    two = Two(tmp_path)
    three = replace(two.config, learner=replace(two.config.learner, nodes=3))
    two.start(0, config=three)
    alike = [two.start(1, config=three) for _ in range(2)]
    until(lambda: any(each.done() for each in alike))
    [refused] = [each for each in alike if each.done()]
    with pytest.raises(ConfigError, match=r"another host has learner\.node=1 too"):
        refused.result()
    for stop in two.stops:
        stop.set()


def other_seed(config: TrainConfig, folder: Path) -> None:
    config.run.seed = 5


def other_folder(config: TrainConfig, folder: Path) -> None:
    config.run.dir = str(folder / "elsewhere")


def unusable_folder(config: TrainConfig, folder: Path) -> None:
    config.run.dir = str(folder / ("too-long" * 40))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_seed, "have different values of run.seed: set"),
        (other_folder, "does not share the folder"),
        (unusable_folder, "does not share the folder"),
    ],
)
def test_hosts_that_do_not_fit_together_are_refused_on_both_with_the_reason(
    change: Callable[[TrainConfig, Path], None], reason: str, tmp_path: Path
) -> None:
    two = Two(tmp_path)
    wrong = replace(two.config, run=replace(two.config.run))
    change(wrong, tmp_path)
    timeouts = replace(SHORT, folder=2.0)
    for each in [two.start(0, timeouts), two.start(1, timeouts, wrong)]:
        with pytest.raises(ConfigError, match=reason):
            each.result()


@pytest.mark.heavy
def test_wrong_keys_are_named_on_both_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two = Two(tmp_path)
    make_keys(tmp_path / "others")
    wrong = replace(two.config, network=replace(two.config.network, keys=str(tmp_path / "others")))
    running = [two.start(0), two.start(1, config=wrong)]
    until(lambda: "or network.keys has keys of another run" in caplog.text)
    until(lambda: "a client was refused" in caplog.text)
    for stop, each in zip(two.stops, running, strict=True):
        stop.set()
        with pytest.raises(StoppedError):
            each.result()


def test_a_first_host_of_another_version_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        caller = Caller(context, f"tcp://127.0.0.1:{port}", None)

        def answer() -> None:
            sender, number, _ = other.recv_multipart()
            other.send_multipart([sender, number, msgspec.msgpack.encode({"begun": "later"})])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="install the same version on all hosts"):
            caller.call(Alive("", 1, [], False), Joined, 60.0)
        thread.join()
        caller.close()


class GivenUp:
    """A connection that ZeroMQ gave up, as its keys were refused, just after it was found ready: it takes nothing."""

    def poll(self, timeout: int, flags: int = zmq.POLLIN) -> bool:
        return flags == zmq.POLLOUT

    def send_multipart(self, frames: list[bytes], flags: int = 0, copy: bool = True) -> None:
        assert flags & zmq.NOBLOCK, "this would wait for ever"
        raise zmq.Again

    def close(self) -> None:
        pass


def test_a_call_over_a_connection_that_was_just_refused_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.ranks.rendezvous.connect", lambda *_: GivenUp())
    with zmq.Context() as context, pytest.raises(UnavailableError, match=r"network\.keys"):
        Caller(context, "tcp://127.0.0.1:1", None).call(Alive("", 1, [], False), Joined, 0.01)
