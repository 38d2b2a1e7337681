"""Another program takes the ports of a run whose processes were killed: the run ends and says which ports."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from asyncrl.runs.from_config import read_config
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import GENEROUS_S, until

pytestmark = pytest.mark.slow


def take(port: int) -> socket.socket:
    """Listen at a port as soon as its process has ended."""

    def listening() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
        return None

    taken: socket.socket = until(listening)
    return taken


@pytest.mark.long
@pytest.mark.parametrize(
    "ports", [{"replay": "replay_port", "learner-0": "weights_port"}, {"learner-0": "weights_port"}], ids=" ".join
)
def test_a_run_whose_ports_another_program_takes_ends_and_names_port_key_and_program(
    ports: dict[str, str], tmp_path: Path
) -> None:
    world = World.make(tmp_path)
    with Run("train", tmp_path, *world.overrides(1), "learner.steps=1000000") as run, ExitStack() as taken:
        run.wait_for_step(1)
        network = read_config(run.dir).network
        for name in ports:
            run.kill(name)
        for key in ports.values():
            taken.enter_context(take(getattr(network, key)))
        assert run.process.wait(GENEROUS_S) == 1
        named = [f"network.{key}={getattr(network, key)}: cannot listen" for key in ports.values()]
        # The role that ends first ends the run.
        assert any(each in run.output for each in named), run.output
        assert "listens there" in run.output
        assert "free that port or name another one (0: a free one is chosen), and resume the run" in run.output
