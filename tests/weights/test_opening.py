"""What the configured channels bring."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.weights.channels.opening import open_channels
from asyncrl.weights.folders import Folder, write_folder
from tests.helpers import OWN_RUN
from tests.weights.fakes import same_bits, some_tensors


@pytest.mark.parametrize(("kind", "unread"), [("sglang", True), ("vllm", True), ("embedded", False)])
def test_folders_go_unread_to_actors_that_have_servers(tmp_path: Path, kind: str, unread: bool) -> None:
    config = TrainConfig()
    config.engine.kind = kind
    config.run.name, config.run.dir = OWN_RUN.name, str(tmp_path)
    config.weights.channel, config.weights.dir = "disk", str(tmp_path)
    write_folder(tmp_path, 1, some_tensors(), lambda folder: None, OWN_RUN)

    async def scenario() -> None:
        [channel] = open_channels(config, None)
        manifest = await channel.newer_than(0)
        assert manifest is not None
        brought = await channel.fetch(manifest)
        assert isinstance(brought, Folder) is unread
        assert same_bits(brought.read() if isinstance(brought, Folder) else brought, some_tensors())

    asyncio.run(scenario())
