"""What the configured channels bring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import TrainConfig
from asyncrl.weights.channels.opening import choose_channel, open_channels
from asyncrl.weights.folders import Folder, run_directory, write_folder
from tests.helpers import OWN_RUN
from tests.weights.fakes import same_bits, some_tensors


@pytest.mark.parametrize(("kind", "unread"), [("sglang", True), ("vllm", True), ("embedded", False)])
async def test_folders_go_unread_to_actors_that_have_servers(tmp_path: Path, kind: str, unread: bool) -> None:
    config = TrainConfig()
    config.engine.kind = kind
    config.run.name, config.run.dir = OWN_RUN.name, str(tmp_path)
    config.weights.channel, config.weights.dir = "disk", str(tmp_path)
    write_folder(run_directory(tmp_path, OWN_RUN), 1, some_tensors(), lambda folder: None)

    channel, zmq = open_channels(config, None)
    assert (channel.name, zmq.name) == ("disk", "zmq")
    manifest = await channel.newer_than(0)
    assert manifest is not None
    brought = await channel.fetch(manifest)
    assert isinstance(brought, Folder) is unread
    assert same_bits(brought.read() if isinstance(brought, Folder) else brought, some_tensors())


@pytest.mark.parametrize(
    ("changes", "device", "channel"),
    [
        ({}, "cpu", "zmq"),
        ({}, "cuda", "distributed"),
        ({"network.host": "10.0.0.1"}, "cuda", "zmq"),
        ({"engine.kind": "sglang"}, "cuda", "zmq"),
        ({"engine.kind": "vllm"}, "cpu", "disk"),
        ({"engine.kind": "sglang", "weights.into_servers": "disk"}, "cpu", "disk"),
        ({"engine.kind": "vllm", "network.host": "10.0.0.1"}, "cpu", "zmq"),
        ({"weights.channel": "disk"}, "cuda", "disk"),
        ({"weights.channel": "distributed", "network.host": "10.0.0.1"}, "cpu", "distributed"),
    ],
)
def test_auto_takes_the_fastest_channel_by_which_no_side_can_hang(
    changes: dict[str, str], device: str, channel: str
) -> None:
    config = TrainConfig()
    for key, new in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, new)
    assert choose_channel(config, torch.device(device))[0] == channel
