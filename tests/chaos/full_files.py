"""`unshare -Urm python -m tests.chaos.full_files SMALL`: each kind of file that a role writes, on a full disk."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from logging.handlers import BufferingHandler
from pathlib import Path

import torch
import zmq
from safetensors.torch import load_file

from asyncrl.config.schema import LearnerConfig, ModelConfig, ObserveConfig, RunConfig, TrainConfig
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.supervisor import Supervisor
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.export import export
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.files import LossyText, when_there_is_room
from asyncrl.observe.from_config import source_of
from asyncrl.observe.sinks import open_metrics
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store.store import Store
from asyncrl.runs.lines import read_lines
from asyncrl.weights.folders import FolderWriter
from tests.chaos.full_disk import fill
from tests.helpers import OWN_RUN, until
from tests.learner.support import save_whole, write_model
from tests.replay.support import make_settings


class Warnings(BufferingHandler):
    """A log handler that keeps what was logged."""

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in list(self.buffer)]


def while_full(folder: Path, action: Callable[[], None]) -> None:
    ballast = fill(folder)
    try:
        action()
    finally:
        for path in ballast:
            path.unlink()


def waits(folder: Path, write: Callable[[], None], seen: Warnings) -> None:
    """`write` waits while the disk is full, says so, and is done once there is room."""
    thread = threading.Thread(target=write)

    def begin() -> None:
        seen.flush()
        thread.start()
        until(lambda: any("the disk is full" in message for message in seen.messages))
        assert thread.is_alive()

    while_full(folder, begin)
    thread.join()
    assert sum("the disk is full" in message for message in seen.messages) == 1


def _quiet(runs: Path, name: str) -> TrainConfig:
    return TrainConfig(run=RunConfig(dir=str(runs), name=name), observe=ObserveConfig(sinks=[]))


def metrics(folder: Path, seen: Warnings) -> None:
    config = _quiet(folder.parent, folder.name)
    sink = open_metrics(source_of(config, "actor-0"), config.observe)
    # Long enough that the file needs another page.
    sink.log(0, {"text": "x" * 10_000})

    def lose() -> None:
        for step in range(1, 4):
            sink.log(step, {"text": "x" * 10_000})

    while_full(folder, lose)
    sink.log(4, {})
    sink.close()
    lines = read_lines(folder / "metrics" / "actor-0.jsonl")
    assert [line["step"] for line in lines] == [0, 4], [line["step"] for line in lines]
    assert lines[-1]["metrics/lost"] == 3
    assert sum("metrics are lost" in message for message in seen.messages) == 1


def metrics_from_the_start(folder: Path) -> None:
    config = _quiet(folder, "late")
    sink = open_metrics(source_of(config, "scoring-0"), config.observe)
    while_full(folder, lambda: sink.log(0, {"text": "x" * 10_000}))
    sink.log(1, {})
    sink.close()
    [line] = read_lines(folder / "late" / "metrics" / "scoring-0.jsonl")
    assert (line["step"], line["metrics/lost"]) == (1, 1)


def logs(folder: Path) -> None:
    with (folder / "log").open("ab") as file:
        stream = LossyText(file.fileno())
        stream.write("before\n" + "x" * 5000)
        while_full(folder, lambda: stream.writelines(["y" * 5000] * 3))
        stream.write("\nafter\n")
    assert "writes to this log were lost" in (folder / "log").read_text()


def supervised(folder: Path, seen: Warnings) -> None:
    def run() -> None:
        role = RoleCommand("learner", [sys.executable, "-c", "pass"])
        supervisor = Supervisor([role], folder, 1, "learner")
        assert supervisor.run(lambda: False, lambda: None, 0.01)

    (folder / "logs").mkdir()
    while_full(folder, run)
    assert any("processes.json cannot be written" in message for message in seen.messages)


def replay(folder: Path, seen: Warnings) -> None:
    """A replay begins, and begins again, once there is room for its store."""
    settings, stop = make_settings(), threading.Event()

    def serve() -> None:
        store = when_there_is_room(lambda: Store(folder / "replay", 1 << 22, durable=True), threading.Event(), "it")
        service = ReplayService(settings, 10.0, time.monotonic)
        with closing(store), zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            stop.set()  # It ends as soon as it has begun.
            ReplayServer(socket, store, service).run(stop)

    waits(folder, serve, seen)
    serve()


def weights(folder: Path, ranks: Ranks, seen: Warnings) -> None:
    model = write_model(folder / "model", layers=1)
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    parts = {"policy": Trainable(policy, 0.1, LearnerConfig())}
    checkpoints = Checkpoints(folder / "checkpoints", 2, ranks)
    waits(folder, lambda: save_whole(checkpoints, Progress(step=1), parts), seen)
    assert checkpoints.restore(parts) == Progress(step=1)
    waits(folder, lambda: export(policy, ModelConfig(str(model)), folder / "out", ranks, threading.Event()), seen)
    assert load_file(folder / "out" / "model.safetensors").keys() == policy.weight_format.shapes.keys()

    writer = FolderWriter(folder / "pushed", lambda _: None, OWN_RUN)

    def fail() -> None:
        writer.write(1, {"w": torch.zeros(5000)})
        until(lambda: writer.failures)
        assert not writer.directory.exists()

    while_full(folder, fail)
    writer.write(2, {"w": torch.zeros(5000)})
    until((writer.directory / "v00000002").exists)
    writer.close()


def main(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    torch.set_num_threads(1)
    seen = Warnings(1 << 20)
    logging.getLogger().addHandler(seen)
    metrics(folder, seen)
    metrics_from_the_start(folder)
    logs(folder)
    supervised(folder, seen)
    replay(folder, seen)
    with joined() as ranks:
        weights(folder, ranks, seen)
    sys.stdout.write(json.dumps(seen.messages))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
