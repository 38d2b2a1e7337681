"""An actor with a server of its own: however and whenever it ends, no process of the server is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from asyncrl.data.writing import write_tasks
from asyncrl.machine.child import kill_group, last_lines
from asyncrl.machine.ports import free_ports
from asyncrl.weights.server import WeightServer
from tests.engine.real import policy
from tests.engine.support import parameters
from tests.helpers import make_task, until
from tests.sglang.support import ARGUMENTS, ENVIRONMENT

START_S = 300.0
END_S = 30.0


class Actor:
    """`python -m asyncrl.actor` with one launched server, a publisher of weights, and no replay."""

    def __init__(self, folder: Path, model: Path) -> None:
        write_tasks(folder / "train.parquet", [make_task()])
        self.publisher = WeightServer("127.0.0.1", 0, zmq.Context.instance())
        self.server_port = free_ports(1)
        self._log = folder / "actor.log"
        command = [sys.executable, "-m", "asyncrl.actor", f"run.dir={folder}"]
        command += [f"model.path={model}", f"data.train={folder}/train.parquet", "actor.max_tokens=512"]
        command += ["engine=sglang", "engine.launch=true", f"engine.python={os.environ['ASYNCRL_SGLANG_PYTHON']}"]
        command += [f"engine.server.port={self.server_port}", f"engine.server.arguments=[{','.join(ARGUMENTS)}]"]
        command += [f"+engine.server.environment.{name}='{value}'" for name, value in ENVIRONMENT.items()]
        command += ["engine.check_s=600", f"network.weights_port={self.publisher.endpoint.rpartition(':')[2]}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def publish(self, version: int) -> None:
        self.publisher.publish(version, parameters(policy(version)))

    def server(self) -> list[psutil.Process]:
        """The server's processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, condition: Callable[[], object]) -> None:
        def met() -> object:
            assert self.process.poll() is None, last_lines(self._log, 30)
            return condition()

        until(met, START_S)

    def said(self, text: str) -> bool:
        return text in self._log.read_text(errors="replace")

    def calls(self) -> int:
        """Open connections to the server."""
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(bool(each.raddr) and each.raddr.port == self.server_port for each in connections)


@pytest.fixture
def actor(tmp_path: Path, model: Path) -> Iterator[Actor]:
    actor = Actor(tmp_path, model)
    with closing(actor.publisher):
        yield actor
        kill_group(actor.process)


def just_started(actor: Actor) -> None:
    actor.wait_for(actor.server)


def starting(actor: Actor) -> None:
    """Wait until the server has begun to start processes of its own, which take seconds to load."""
    actor.wait_for(lambda: len(actor.server()) >= 4)


def serving(actor: Actor) -> None:
    actor.publish(0)
    actor.wait_for(lambda: actor.said("the engine serves version 0"))


def updating(actor: Actor) -> None:
    """Stop the server from answering in the middle of an update."""
    serving(actor)
    actor.wait_for(lambda: actor.calls() == 0)
    for process in actor.server():
        process.suspend()
    actor.publish(1)
    actor.wait_for(actor.calls)


MOMENTS = [just_started, starting, serving, updating]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
SOME = [(starting, signal.SIGKILL), (serving, signal.SIGINT), (updating, signal.SIGTERM)]
ALL = [(when, number) for when in MOMENTS for number in SIGNALS]


@pytest.mark.parametrize(("when", "number"), ALL if "ASYNCRL_SGLANG_ALL" in os.environ else SOME)
def test_an_actor_that_ends_leaves_no_process_of_its_server(
    actor: Actor, when: Callable[[Actor], None], number: signal.Signals
) -> None:
    when(actor)
    left = actor.server()
    assert left
    actor.process.send_signal(number)
    try:
        until(lambda: actor.process.poll() is not None, END_S)
        assert actor.process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        until(lambda: not any(alive(process) for process in left), END_S)
    finally:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
